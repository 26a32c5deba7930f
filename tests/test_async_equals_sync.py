"""Async equals sync, uni equals mp: the real scheduler, runner and device with HashLM, whose every token
depends on every earlier token, block and position."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conversation import Seen, Story, play
from stepahead.config import ResolvedConfig, parse_settings, resolve
from stepahead.engine_core.engine import EngineCore
from stepahead.executor.registry import executor_class
from stepahead.worker.model_config import ModelConfig

EXAMPLES = int(os.environ.get("STEPAHEAD_EXAMPLES", "500"))
VOCAB, MAX_LEN = 64, 32


def make_config(step_ms: float = 0.0, **chosen: Any) -> ResolvedConfig:
    settings = {"executor": "uni", "device": "cpu", "load_format": "dummy", "max_model_len": MAX_LEN, **chosen}
    model = ModelConfig(architecture="HashLM", vocab_size=VOCAB, max_position=MAX_LEN, step_ms=step_ms)
    return resolve(parse_settings("hash-lm", settings), model, executor_supports_async=True)


def make_engine(watched: bool = False, **chosen: Any) -> EngineCore:
    """watched: whether to look at every operation for a wait, which takes longer than the operation."""
    config = make_config(**chosen)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("STEPAHEAD_SYNC_CHECK", "error" if watched else "off")
        return EngineCore(config, executor_class(config.settings.executor)(config))


class Alone:
    """Answers what a request yields by itself, one step at a time: its tokens and why it ended."""

    def __init__(self) -> None:
        self.engine = make_engine(async_scheduling=False, enable_prefix_caching=False, num_kv_blocks=8, max_num_seqs=1)
        self.known: dict[Story, tuple[tuple[int, ...], str]] = {}

    def __call__(self, story: Story) -> tuple[tuple[int, ...], str]:
        story = dataclasses.replace(story, priority=0, arrives=0, leaves=None)
        if story not in self.known:
            seen = play(self.engine, [story])
            self.known[story] = tuple(seen.tokens[0]), seen.finished[0].reason
        return self.known[story]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    alone = Alone()
    yield alone
    alone.engine.shutdown()


@st.composite
def stories(draw: st.DrawFn) -> list[Story]:
    tokens = st.integers(0, VOCAB - 1)
    shared = draw(st.lists(tokens, max_size=12))
    result = []
    for _ in range(draw(st.integers(2, 6))):
        prompt = (shared if draw(st.booleans()) else []) + draw(st.lists(tokens, min_size=1, max_size=10))
        stop_ids = st.lists(tokens, max_size=4, unique=True) if draw(st.booleans()) else st.just([])
        result.append(
            Story(
                prompt=tuple(prompt),
                max_tokens=draw(st.one_of(st.integers(1, 30), st.just(30))),
                stop_ids=tuple(draw(stop_ids)),
                priority=draw(st.integers(0, 2)),
                arrives=draw(st.sampled_from([0, 0, 1, 2, 5, 20])),
                leaves=draw(st.one_of(st.none(), st.none(), st.integers(0, 30))),
                early=draw(st.booleans()),
                temperature=draw(st.sampled_from([0.0, 1.0])),
                seed=draw(st.integers(0, 2**63 - 1)),
            )
        )
    return result


@st.composite
def engine_settings(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 4, 16]))
    smallest = MAX_LEN // block_size
    return {
        "block_size": block_size,
        "num_kv_blocks": smallest + draw(st.sampled_from([0, 0, 1, smallest // 2, smallest * 2])),
        "max_num_seqs": draw(st.sampled_from([1, 2, 4, 6, 6])),
        "max_num_batched_tokens": draw(st.sampled_from([1, 3, 8, 64, 64])),
        "enable_prefix_caching": draw(st.booleans()),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "async_scheduling": draw(st.sampled_from([True, True, False])),
        "step_ms": draw(st.sampled_from([0.0, 0.0, 0.3])),
    }


def check(engine: EngineCore, story_list: list[Story], seen: Seen, alone: Alone) -> None:
    for request_id, story in enumerate(story_list):
        tokens, reason = alone(story)
        got = tuple(seen.tokens[request_id])
        if request_id in seen.finished:
            assert (got, seen.finished[request_id].reason) == (tokens, reason)
        else:
            assert request_id in seen.aborted
            assert got == tokens[: len(got)]
    assert engine.stats.rows_beyond_limit == 0
    assert engine.stats.wasted_rows <= engine.stats.finished
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


@pytest.mark.timeout(900)
def test_every_request_equals_itself_alone_in_sync_mode(alone: Alone) -> None:
    preempting = 0

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(stories(), engine_settings(), st.integers(0, 7).map(lambda n: n == 7))
    def whatever_happens(story_list: list[Story], chosen: dict[str, Any], watched: bool) -> None:
        nonlocal preempting
        engine = make_engine(watched=watched, **chosen)
        try:
            check(engine, story_list, play(engine, story_list), alone)
        finally:
            engine.shutdown()
        preempting += engine.stats.preemptions > 0

    whatever_happens()
    assert preempting > EXAMPLES // 50, "the stories have become too easy: hardly any forces a preemption"


@pytest.fixture(scope="module")
def mp_engine() -> Iterator[EngineCore]:
    engine = make_engine(
        watched=True,
        executor="mp",
        block_size=4,
        num_kv_blocks=10,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        step_ms=0.2,
    )
    yield engine
    engine.shutdown()


@settings(max_examples=max(EXAMPLES // 10, 20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stories())
@pytest.mark.timeout(600)
def test_a_worker_process_gives_the_same_tokens(mp_engine: EngineCore, alone: Alone, story_list: list[Story]) -> None:
    check(mp_engine, story_list, play(mp_engine, story_list), alone)
