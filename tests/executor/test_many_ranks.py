"""Ranks that share a model give the tokens of one, whatever the scheduling: real processes over gloo."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conversation import Story, play
from external_workers import workers
from oracle import token_ids
from process_tools import nothing_left_behind
from stepahead import LLM, ConfigError, SamplingParams
from stepahead.config import parse_settings, resolve
from stepahead.engine_core.engine import EngineCore
from stepahead.executor.multiproc import MultiprocExecutor
from stepahead.executor.uniproc import UniProcExecutor
from stepahead.worker.model_config import ModelConfig
from tiny_models import VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.timeout(120)

THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 8, "num_hidden_layers": 4}
TWO = {"num_key_value_heads": 2, "num_hidden_layers": 3}
ONE_KV_HEAD = {"num_key_value_heads": 1, "num_hidden_layers": 3}
MAX_LEN = 32


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in (1, 7, 16, 33, 50)]


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=10, ignore_eos=True) for i in range(5)]
    settings = {"device": "cpu", "skip_tokenizer_init": True, "max_num_batched_tokens": 32, **settings}
    with LLM(str(folder), **settings) as llm:
        return [token_ids(output) for output in llm.generate(prompts(), params, use_tqdm=False)]


ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "HashLM")
SIZES = {(2, 1): TWO, (3, 1): THREE, (1, 2): ONE_KV_HEAD, (1, 3): THREE, (2, 2): ONE_KV_HEAD}
"""(tensor, stages), and a shape they can divide: KV heads are split or, when there is only one, held by each rank."""


def model_for(architecture: str, tensor: int, stages: int, folder: Path) -> Path:
    own = {"LlamaForCausalLM": {"tie_word_embeddings": True}, "MistralForCausalLM": {"sliding_window": 24}}
    fields = {} if architecture == "HashLM" else {**SIZES[tensor, stages], **own.get(architecture, {})}
    return make_tiny_model(architecture, folder, **fields)


@pytest.mark.parametrize(("tensor", "stages"), SIZES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_many_ranks_give_the_tokens_of_one(
    architecture: str, tensor: int, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = ARCHITECTURES.index(architecture) + list(SIZES).index((tensor, stages))
    folder = model_for(architecture, tensor, stages, tmp_path)
    alone = tokens(folder, executor="uni")
    with nothing_left_behind(monkeypatch):
        sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
        assert tokens(folder, async_scheduling=number % 2 == 0, **sizes) == alone


@pytest.mark.parametrize(
    ("architecture", "tensor", "stages", "async_scheduling"),
    [
        ("Qwen3ForCausalLM", 2, 1, True),
        ("MistralForCausalLM", 3, 1, False),
        ("HashLM", 1, 2, False),
        ("Qwen2ForCausalLM", 1, 3, True),
        ("LlamaForCausalLM", 2, 2, True),
    ],
)
def test_ranks_that_others_started_give_the_tokens_of_one(
    architecture: str, tensor: int, stages: int, async_scheduling: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run what an engine's own do: each size once, each architecture once."""
    folder = model_for(architecture, tensor, stages, tmp_path)
    alone = tokens(folder, executor="uni")
    with nothing_left_behind(monkeypatch), tempfile.TemporaryDirectory() as private:
        links = {"executor": "external", "executor_address": f"ipc://{private}/plans"}
        sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
        with workers(links["executor_address"], tensor * stages):
            assert tokens(folder, async_scheduling=async_scheduling, **links, **sizes) == alone


def engine(executor: Any, **chosen: Any) -> EngineCore:
    model = ModelConfig(architecture="HashLM", vocab_size=64, max_position=MAX_LEN, step_ms=0.2)
    given = {"device": "cpu", "max_model_len": MAX_LEN, "block_size": 4, "num_kv_blocks": 10, "max_num_seqs": 5}
    config = resolve(parse_settings("hash-lm", {**given, "max_num_batched_tokens": 16, **chosen}), model, True)
    return EngineCore(config, executor(config))


@pytest.fixture(scope="module")
def alone() -> Iterator[EngineCore]:
    engine_alone = engine(UniProcExecutor, async_scheduling=False, max_num_seqs=1, enable_prefix_caching=False)
    yield engine_alone
    engine_alone.shutdown()


@pytest.fixture(scope="module")
def pipeline() -> Iterator[EngineCore]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("STEPAHEAD_SYNC_CHECK", "error")
        engine_of_three = engine(MultiprocExecutor, pipeline_parallel_size=3)
    yield engine_of_three
    engine_of_three.shutdown()


@st.composite
def stories(draw: st.DrawFn) -> list[Story]:
    shared = draw(st.lists(st.integers(0, 63), max_size=12))
    return [
        Story(
            prompt=tuple(shared + draw(st.lists(st.integers(0, 63), min_size=1, max_size=10))),
            max_tokens=draw(st.integers(1, 25)),
            stop_ids=tuple(draw(st.lists(st.integers(0, 63), max_size=4, unique=True))),
            arrives=draw(st.sampled_from([0, 0, 1, 5])),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 1000)),
        )
        for _ in range(draw(st.integers(1, 7)))
    ]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stories())
def test_whatever_is_asked_of_a_pipeline_it_answers_like_one_stage(
    pipeline: EngineCore, alone: EngineCore, story_list: list[Story]
) -> None:
    """Preemptions, shared prefixes, stops with rows in flight and reused slots included."""
    seen = play(pipeline, story_list)
    for request_id, story in enumerate(story_list):
        expected = play(alone, [story])
        assert seen.tokens[request_id] == expected.tokens[0]
        assert seen.finished[request_id].reason == expected.finished[0].reason


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tensor_parallel_size": 2},
            "3 KV heads cannot .* tensor_parallel_size=2 ranks; this model can use 1, 3 or 6",
        ),
        ({"tensor_parallel_size": 4}, "6 attention heads cannot be divided among tensor_parallel_size=4"),
        ({"pipeline_parallel_size": 5}, "4 layers cannot be divided among pipeline_parallel_size=5"),
        ({"tensor_parallel_size": 3, "executor": "uni"}, "executor 'uni' runs one rank, not 3"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_before_a_process_starts(
    sizes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path, **THREE)
    started: list[Any] = []
    monkeypatch.setattr("subprocess.Popen", lambda *arguments, **_: started.append(arguments))
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(str(folder), device="cpu", skip_tokenizer_init=True, **sizes)
    assert "\n" not in str(caught.value)
    assert not started
