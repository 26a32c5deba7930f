"""A rank that fails is named at once, with its own account of it; ranks that wait for it are released."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from failing_worker import VARIABLE, FailingMultiproc
from plans import plan
from process_tools import nothing_left_behind
from stepahead.config import parse_settings, resolve
from stepahead.errors import WorkerError
from stepahead.executor.base import Executor
from stepahead.worker.model_config import ModelConfig

pytestmark = pytest.mark.timeout(90)

TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
SOON = 5.0
"""Seconds: far below every time-out."""


@pytest.fixture(autouse=True)
def _nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_left_behind(monkeypatch):
        yield


def start(monkeypatch: pytest.MonkeyPatch, rank: int, where: str, sizes: dict[str, int]) -> Executor:
    monkeypatch.setenv(VARIABLE, f"{rank}:{where}")
    model = ModelConfig(architecture="HashLM", vocab_size=64, max_position=64)
    config = resolve(parse_settings("hash-lm", {"device": "cpu", "num_kv_blocks": 8, **sizes}), model, True)
    executor = FailingMultiproc(config)
    executor.initialize_cache(8, 64)
    return executor


def step(executor: Executor, step_id: int) -> Any:
    executor.execute_model(plan(step_id))
    return executor.sample_tokens(None)


@pytest.mark.parametrize(
    ("rank", "where", "sizes"),
    [(1, "killed-joining", TENSOR), (0, "killed-loaded", PIPELINE), (1, "killed-loaded", TENSOR)],
)
def test_a_rank_killed_while_it_starts_is_named(
    rank: int, where: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkerError, match=f"worker rank {rank}: was killed by SIGKILL"):
        start(monkeypatch, rank, where, sizes)


@pytest.mark.parametrize(("rank", "sizes"), [(1, TENSOR), (0, PIPELINE)])
def test_a_rank_that_cannot_load_says_why_and_the_others_are_released(
    rank: int, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkerError, match=f"worker rank {rank}: ZeroDivisionError: planted") as caught:
        start(monkeypatch, rank, "raises-loading", sizes)
    assert "failing_worker.py" in caught.value.remote_traceback


@pytest.mark.parametrize(
    ("rank", "where", "sizes"),
    [(1, "raises", TENSOR), (1, "raises-on-device", TENSOR), (0, "raises-on-device", PIPELINE)],
)
def test_an_exception_on_a_rank_that_does_not_answer_surfaces_with_its_traceback(
    rank: int, where: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = start(monkeypatch, rank, where, sizes)
    step(executor, 0).result()
    began = time.monotonic()
    with pytest.raises(WorkerError, match=f"worker rank {rank}: ZeroDivisionError: planted") as caught:
        step(executor, 1).result()
    assert "failing_worker.py" in caught.value.remote_traceback
    executor.shutdown()
    assert time.monotonic() - began < SOON


def test_a_rank_that_is_dead_is_named_as_that_and_not_as_one_that_is_not_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = start(monkeypatch, 0, "nowhere", TENSOR)
    step(executor, 0).result()
    os.kill(executor.worker_infos()[1].pid, signal.SIGKILL)
    time.sleep(0.5)
    executor.execute_model(plan(1))
    future = executor.sample_tokens(None)  # reaches rank 0 alone, which then waits for the other one
    with pytest.raises(WorkerError, match="worker rank 1: was killed by SIGKILL"):
        future.result()
    executor.shutdown()


@pytest.mark.parametrize(
    ("rank", "sizes", "killed_in"), [(0, TENSOR, 0), (1, PIPELINE, 0), (1, TENSOR, 1), (0, PIPELINE, 1)]
)
def test_a_rank_killed_in_a_step_is_named_and_not_those_that_miss_it(
    rank: int, sizes: dict[str, int], killed_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 0 is a prefill, step 1 a decode. The other rank waits for this one when it is killed."""
    executor = start(monkeypatch, rank, f"stuck-{killed_in}", sizes)
    for earlier in range(killed_in):
        step(executor, earlier).result()
    future = step(executor, killed_in)
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(executor.worker_infos()[rank].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=f"worker rank {rank}: was killed by SIGKILL"):
        future.result()
    executor.shutdown()
    assert time.monotonic() - began < SOON
