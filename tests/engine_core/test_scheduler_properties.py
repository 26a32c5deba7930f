"""Whatever happens around a request, it yields what it yields alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conversation import Story, play
from paper_device import VOCAB, PaperExecutor, generate_alone, paper_config
from stepahead.engine_core.engine import EngineCore

MAX_LEN = 64


@st.composite
def stories(draw: st.DrawFn, max_requests: int = 8) -> list[Story]:
    shared = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0, max_size=24))
    result = []
    for _ in range(draw(st.integers(2, max_requests))):
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
        prompt = (shared if draw(st.booleans()) else []) + own
        stop_ids = st.lists(st.integers(0, VOCAB - 1), max_size=4, unique=True) if draw(st.booleans()) else st.just([])
        result.append(
            Story(
                prompt=tuple(prompt[: MAX_LEN - 1]),
                max_tokens=draw(st.one_of(st.integers(1, 60), st.just(60))),
                stop_ids=tuple(draw(stop_ids)),
                priority=draw(st.integers(0, 2)),
                arrives=draw(st.sampled_from([0, 0, 1, 2, 5, 20])),
                leaves=draw(st.one_of(st.none(), st.none(), st.integers(0, 60))),
                early=draw(st.booleans()),
                salt=draw(st.sampled_from(["", "", "tenant"])),
            )
        )
    return result


@st.composite
def engine_settings(draw: st.DrawFn) -> dict[str, object]:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    smallest = -(-MAX_LEN // block_size)
    return {
        "block_size": block_size,
        "num_kv_blocks": smallest + draw(st.sampled_from([0, 0, 1, smallest // 2, smallest * 3])),
        "max_num_seqs": draw(st.sampled_from([1, 2, 4, 6, 6])),
        "max_num_batched_tokens": draw(st.sampled_from([1, 3, 16, 40, 40])),
        "enable_prefix_caching": draw(st.booleans()),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "max_model_len": MAX_LEN,
    }


def check(engine: EngineCore, story_list: list[Story]) -> None:
    seen = play(engine, story_list)
    check_counts(engine)
    assert engine.stats.wasted_rows <= engine.stats.finished
    for request_id, story in enumerate(story_list):
        alone = generate_alone(story.prompt, story.max_tokens, story.stop_ids, MAX_LEN)
        tokens = seen.tokens[request_id]
        if request_id in seen.finished:
            assert tokens == alone
            expected = "stop" if alone[-1] in story.stop_ids else "length"
            assert seen.finished[request_id].reason == expected
        else:
            assert request_id in seen.aborted
            assert tokens == alone[: len(tokens)]


def check_counts(engine: EngineCore) -> None:
    """Once it is idle."""
    stats = engine.stats
    assert stats.rows_beyond_limit == 0
    sampled_rows = sum(int(plan.samples.sum()) for plan in engine.executor.plans)
    assert sampled_rows == stats.generated_tokens + stats.wasted_rows + stats.aborted_rows, "tokens in flight were lost"
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    assert engine.scheduler.table.num_free == engine.scheduler.table.num_slots


def test_every_request_yields_what_it_yields_alone() -> None:
    preempting = 0

    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(stories(), engine_settings(), st.booleans())
    def whatever_happens(story_list: list[Story], chosen: dict[str, object], async_scheduling: bool) -> None:
        nonlocal preempting
        config = paper_config(async_scheduling=async_scheduling, **chosen)
        engine = EngineCore(config, PaperExecutor(config))
        check(engine, story_list)
        preempting += engine.stats.preemptions > 0

    whatever_happens()
    assert preempting > 10, "the stories have become too easy: hardly any forces a preemption"


def test_a_deeper_queue_changes_nothing() -> None:
    preempting = 0

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(stories(), engine_settings())
    def whatever_happens(story_list: list[Story], chosen: dict[str, object]) -> None:
        nonlocal preempting
        config = paper_config(pipeline_parallel_size=3, **chosen)
        assert config.max_in_flight == 4
        engine = EngineCore(config, PaperExecutor(config))
        seen = play(engine, [replace(story, leaves=None) for story in story_list])
        check_counts(engine)
        for request_id, story in enumerate(story_list):
            assert seen.tokens[request_id] == generate_alone(story.prompt, story.max_tokens, story.stop_ids, MAX_LEN)
        preempting += engine.stats.preemptions > 0

    whatever_happens()
    assert preempting > 5, "the stories have become too easy: hardly any forces a preemption"


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_pool_for_one_request_serves_many(async_scheduling: bool) -> None:
    config = paper_config(
        block_size=4,
        num_kv_blocks=MAX_LEN // 4,
        max_model_len=MAX_LEN,
        max_num_seqs=6,
        async_scheduling=async_scheduling,
    )
    engine = EngineCore(config, PaperExecutor(config))
    check(engine, [Story(prompt=(i, 2, 3), max_tokens=60) for i in range(8)])
    assert engine.stats.preemptions > 0
