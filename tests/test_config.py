"""Settings: what is refused, and how the automatic ones are resolved."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import stepahead.config
from paper_device import PaperExecutor, paper_config
from stepahead.config import parse_settings, resolve, resolve_async_scheduling
from stepahead.engine_core.engine import EngineCore
from stepahead.errors import ConfigError
from stepahead.executor.base import Executor
from stepahead.executor.multiproc import MultiprocExecutor
from stepahead.executor.uniproc import UniProcExecutor
from stepahead.worker.model_config import ModelConfig

MODEL = ModelConfig(architecture="HashLM", vocab_size=10, max_position=100)


@pytest.mark.parametrize(
    ("asked", "supported", "expected"),
    [(None, True, True), (True, True, True), (False, True, False), (None, False, False), (False, False, False)],
)
def test_async_scheduling_is_on_wherever_it_can_be(asked: bool | None, supported: bool, expected: bool) -> None:
    on, reason = resolve_async_scheduling(parse_settings("m", {"async_scheduling": asked}), supported)
    assert on is expected
    assert reason


def test_asking_for_async_where_it_cannot_be_had_is_an_error_that_says_why() -> None:
    with pytest.raises(ValueError, match="does not say that it supports async scheduling"):
        resolve(parse_settings("m", {"async_scheduling": True}), MODEL, executor_supports_async=False)


def test_an_executor_that_says_nothing_does_not_support_async_scheduling() -> None:
    assert Executor.supports_async_scheduling() is False
    assert MultiprocExecutor.supports_async_scheduling() is True


def test_async_scheduling_is_never_off_silently(caplog: pytest.LogCaptureFixture) -> None:
    config = stepahead.config.resolve(paper_config().settings, MODEL, executor_supports_async=False)
    with caplog.at_level(logging.WARNING):
        EngineCore(config, PaperExecutor(config))
    assert "async scheduling: off (executor" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_seq": 4}, "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be at least 1"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"max_num_seqs": 10**6}, "max_num_seqs=1000000: must be at most 65536"),
        ({"max_num_batched_tokens": 10**9}, "max_num_batched_tokens=1000000000: must be at most 1048576"),
        ({"block_size": 12}, "block_size=12: must be a power of two"),
        ({"dtype": "int4"}, "dtype='int4': must be one of auto, float32"),
        ({"executor": "thread"}, "executor='thread'"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"step_timeout": 0.0}, "step_timeout=0.0"),
        ({"step_timeout": float("nan")}, "step_timeout=nan: must be above 0 and at most 1e+09"),
        ({"step_timeout": float("inf")}, "step_timeout=inf"),
        ({"max_model_len": 1}, "max_model_len=1: must be at least 2"),
        ({"seed": 2**63}, "seed=9223372036854775808: must be a 64-bit number"),
        ({"tensor_parallel_size": 2, "executor": "uni"}, "executor 'uni' runs one rank, not 2"),
    ],
)
def test_bad_settings_are_refused_with_their_value_and_the_limit(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings("m", settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_context_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=101 is longer than the model's 100 positions"):
        resolve(parse_settings("m", {"max_model_len": 101}), MODEL, executor_supports_async=True)


def test_more_token_ids_than_the_machine_has_memory_for_are_refused() -> None:
    long = ModelConfig(architecture="HashLM", vocab_size=10, max_position=2**40)
    with pytest.raises(ConfigError, match=r"max_num_seqs=256: .*max_model_len=1099511627776 .* must be at most \d+"):
        resolve(parse_settings("m", {}), long, executor_supports_async=True)


def test_the_queue_is_one_deeper_with_async_scheduling() -> None:
    assert paper_config().max_in_flight == 2
    assert paper_config(async_scheduling=False).max_in_flight == 1


def test_an_executor_is_given_by_name_by_class_or_by_import_path() -> None:
    for given in (UniProcExecutor, "stepahead.executor.uniproc:UniProcExecutor"):
        assert parse_settings("m", {"executor": given}).executor == "stepahead.executor.uniproc:UniProcExecutor"


def test_a_class_that_no_other_process_can_import_is_refused() -> None:
    class Mine(UniProcExecutor):
        pass

    for given in (Mine, type("Script", (UniProcExecutor,), {"__module__": "__main__"})):
        with pytest.raises(ConfigError, match="top of a module"):
            parse_settings("m", {"executor": given})


def test_a_path_that_is_no_utf_8_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model='/m\\udcff': must be UTF-8"):
        parse_settings("/m\udcff", {})
    with pytest.raises(ConfigError, match=r"tokenizer='\\udcff': must be UTF-8"):
        parse_settings("/m", {"tokenizer": "\udcff"})
