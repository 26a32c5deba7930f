"""How a pipeline's steps share out the rows: in turn, so that every stage has some."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from conversation import Story, play
from paper_device import PaperExecutor, paper_config
from stepahead.engine_core.engine import EngineCore
from stepahead.engine_core.request_table import RequestTable
from stepahead.engine_core.step_shares import in_turn
from stepahead.worker.messages import StepPlan


def run(num_requests: int, num_stages: int, async_scheduling: bool) -> list[StepPlan]:
    """The plans of requests that arrive together and decode 40 tokens each."""
    config = paper_config(
        pipeline_parallel_size=num_stages, async_scheduling=async_scheduling, num_kv_blocks=512, max_num_seqs=16
    )
    executor = PaperExecutor(config)
    engine = EngineCore(config, executor)
    play(engine, [Story(prompt=(i, 2, 3), max_tokens=40) for i in range(num_requests)])
    return executor.plans


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize(("num_requests", "num_stages"), [(8, 2), (9, 2), (9, 3), (16, 3)])
def test_a_row_decodes_once_in_as_many_steps_as_there_are_stages(
    num_requests: int, num_stages: int, async_scheduling: bool
) -> None:
    plans = run(num_requests, num_stages, async_scheduling)
    share = -(-num_requests // num_stages)
    steady = plans[num_stages + 1 : 30]
    assert all(len(plan.slots) <= share for plan in steady)
    for i in range(len(steady) - num_stages + 1):
        together = np.concatenate([plan.slots for plan in steady[i : i + num_stages]])
        assert len(together) == num_requests, "some step has less than its share"
        assert len(set(together.tolist())) == num_requests


@pytest.mark.parametrize("num_requests", [2, 7])
def test_without_a_pipeline_every_row_is_in_every_step(num_requests: int) -> None:
    plans = run(num_requests, 1, True)
    assert all(len(plan.slots) == num_requests for plan in plans[:-1])


@pytest.mark.parametrize(("async_scheduling", "started"), [(True, 2), (False, 1)])
def test_a_lone_request_is_planned_a_step_ahead_unless_scheduling_is_synchronous(
    async_scheduling: bool, started: int
) -> None:
    config = paper_config(pipeline_parallel_size=3, async_scheduling=async_scheduling)
    executor = PaperExecutor(config)
    engine = EngineCore(config, executor)
    engine.add_request(Story(prompt=(1, 2), max_tokens=9).message(0))
    while (batch := engine.step()) is None:
        pass
    assert batch.step_id == 1
    assert len(executor.plans) == started


def test_chunks_of_one_prompt_follow_each_other_at_once() -> None:
    config = paper_config(pipeline_parallel_size=3, max_num_batched_tokens=4, max_num_seqs=1)
    executor = PaperExecutor(config)
    play(EngineCore(config, executor), [Story(prompt=tuple(range(16)), max_tokens=2)])
    assert [plan.num_query.tolist() for plan in executor.plans] == [[4], [4], [4], [4], [1]]
    assert all(after.step_id == before.step_id + 1 for before, after in pairwise(executor.plans))


def test_early_rows_have_one_token_in_flight_at_most() -> None:
    table = RequestTable(3, 8, 4)
    slots = np.arange(3)
    table.num_placeholders[:] = [0, 1, 2]
    table.sampled_step[:] = [4, 4, 3]
    pending = np.ones(3, np.int32)
    assert in_turn(table, slots, pending, 5, 3, early=False).tolist() == [1, 0, 0]
    table.num_placeholders[0] = 2
    assert in_turn(table, slots, pending, 5, 3, early=True).tolist() == [0, 1, 0]
