"""Preempted requests whose tokens are still in flight: whatever happens to them then, nobody else is harmed."""

from __future__ import annotations

import numpy as np

from conversation import Story, play
from paper_device import PaperExecutor, generate_alone, paper_config
from stepahead.engine_core.engine import EngineCore
from stepahead.engine_core.messages import EngineRequest, OutputBatch
from stepahead.engine_core.request import State
from stepahead.engine_core.scheduler import ScheduledStep, Scheduler, SchedulerLimits
from stepahead.engine_core.stats import EngineStats
from stepahead.worker.messages import Logprobs, PromptLogprobs, SamplingOptions, StepOutput

MAX_LEN = 32


def make_engine() -> EngineCore:
    """A pool for one request of MAX_LEN, and a queue so deep that a preempted request drains for several turns."""
    config = paper_config(
        pipeline_parallel_size=3, block_size=4, num_kv_blocks=MAX_LEN // 4, max_model_len=MAX_LEN, max_num_seqs=3
    )
    return EngineCore(config, PaperExecutor(config))


def run_until_one_drains(engine: EngineCore) -> int:
    """Returns its id."""
    while engine.has_work():
        engine.step()
        for request in engine.scheduler.table.requests:
            if request is not None and request.state is State.DRAINING:
                return request.request_id
    raise AssertionError("no request was preempted with tokens in flight")


def test_an_abort_while_draining_lets_others_in() -> None:
    engine = make_engine()
    for request_id, prompt in enumerate([(1, 2, 3), (4, 5, 6), (7, 8, 9)]):
        engine.add_request(Story(prompt=prompt, max_tokens=28).message(request_id))
    draining = run_until_one_drains(engine)
    engine.abort_requests([draining])
    seen = play(engine, [])
    assert set(seen.finished) == {0, 1, 2} - {draining}


def test_nobody_overtakes_a_preempted_request() -> None:
    engine = make_engine()
    for request_id, prompt in enumerate([(1, 2, 3), (4, 5, 6)]):
        engine.add_request(Story(prompt=prompt, max_tokens=28).message(request_id))
    run_until_one_drains(engine)
    engine.add_request(Story(prompt=(7,), max_tokens=1).message(2))
    play(engine, [])
    entries = [int(new.token_ids[0]) for plan in engine.executor.plans for new in plan.new_requests]
    assert entries == [1, 4, 4, 7]


def test_a_block_that_was_given_up_is_not_remembered_when_its_last_token_lands() -> None:
    """It is the other request's by then: whoever continues the answer would read a stranger's tokens."""
    ended_while_draining = 0
    for others_tokens in range(12, 20):
        for max_tokens in range(10, 18):
            engine, prompt = make_engine(), (1, 2, 3)
            engine.add_request(Story(prompt=(40, 41, 42), max_tokens=others_tokens).message(0))
            engine.add_request(Story(prompt=prompt, max_tokens=max_tokens).message(1))
            exits = len(play(engine, []).finished) + engine.stats.preemptions
            entries = sum(len(plan.new_requests) for plan in engine.executor.plans)
            ended_while_draining += exits > entries
            follow_up = (*prompt, *generate_alone(prompt, max_tokens, (), MAX_LEN), 9)
            engine.add_request(Story(prompt=follow_up, max_tokens=2).message(2))
            assert play(engine, []).tokens[2] == generate_alone(follow_up, 2, (), MAX_LEN)
    assert ended_while_draining > 0


# ---- log-probabilities of a prompt that is computed in chunks ---------------------------------------


def make_scheduler(num_blocks: int, max_seqs: int, max_batched_tokens: int = 4) -> Scheduler:
    limits = SchedulerLimits(
        max_seqs=max_seqs,
        max_batched_tokens=max_batched_tokens,
        max_model_len=num_blocks * 4,
        max_model_len_from="the test",
        num_blocks=num_blocks,
        block_size=4,
    )
    return Scheduler(limits, EngineStats())


def scored(request_id: int, num_prompt: int) -> EngineRequest:
    options = SamplingOptions(seed=0, prompt_logprobs=0)
    prompt = np.arange(num_prompt, dtype=np.int32)
    return EngineRequest(request_id=request_id, prompt=prompt, options=options, max_tokens=2)


def output_of(scheduler: Scheduler, step: ScheduledStep, request_id: int) -> StepOutput:
    """As a worker would answer right after the step was planned: the request's prompt tokens that it scores have
    their own positions as log-probabilities."""
    plan, parts = step.plan, []
    for row, (slot, count) in enumerate(zip(plan.slots.tolist(), plan.num_query.tolist(), strict=True)):
        first = int(scheduler.table.num_computed[slot]) - count + 1
        positions = np.arange(first, min(first + count, scheduler.table.num_prompt[slot]), dtype=np.float32)
        if scheduler.table.request_id[slot] == request_id and positions.size:
            zeros = np.zeros(len(positions), np.int32)
            parts.append(PromptLogprobs(row, first, Logprobs(zeros[:, None], positions[:, None], zeros)))
    num_sampled = plan.samples.astype(np.int32)
    return StepOutput(plan.step_id, np.zeros((len(plan.slots), 1), np.int32), num_sampled, None, parts)


def told(batches: list[OutputBatch | None]) -> list[list[float]]:
    return [part.values.logprobs[:, 0].tolist() for batch in batches if batch for part in batch.prompt_logprobs]


def test_a_chunk_of_an_aborted_request_does_not_count_for_its_slots_next_owner() -> None:
    scheduler = make_scheduler(num_blocks=8, max_seqs=1)
    scheduler.add(scored(0, 10))
    in_flight = [(step := scheduler.schedule(), output_of(scheduler, step, 0))]
    scheduler.abort([0])
    scheduler.add(scored(1, 10))
    batches = []
    for _ in range(3):
        in_flight.append((step := scheduler.schedule(), output_of(scheduler, step, 1)))
        batches.append(scheduler.update(*in_flight.pop(0)))
    batches.append(scheduler.update(*in_flight.pop(0)))
    assert told(batches) == [list(range(1, 10))]


def test_a_prompt_preempted_between_two_chunks_is_told_once() -> None:
    scheduler = make_scheduler(num_blocks=5, max_seqs=2, max_batched_tokens=2)
    scheduler.add(Story(prompt=(1, 2, 3), max_tokens=13).message(0))
    scheduler.add(scored(1, 12))
    batches = []
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        assert step is not None
        batches.append(scheduler.update(step, output_of(scheduler, step, 1)))
    assert scheduler.stats.preemptions == 1
    assert told(batches) == [list(range(1, 12))]
