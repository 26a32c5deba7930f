"""Log-probabilities of prompts that are computed in chunks: each position is told once, whatever happens meanwhile."""

from __future__ import annotations

import msgspec
import numpy as np

from conversation import Story
from stepahead.engine_core.messages import EngineRequest, OutputBatch
from stepahead.engine_core.scheduler import ScheduledStep, Scheduler, SchedulerLimits
from stepahead.engine_core.stats import EngineStats
from stepahead.worker.messages import Logprobs, PromptLogprobs, SamplingOptions, StepOutput


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


def scored(request_id: int, num_prompt: int, top: int = 0) -> EngineRequest:
    options = SamplingOptions(seed=0, prompt_logprobs=top)
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


def test_chunks_beside_a_request_that_asks_for_more_are_as_wide_as_the_others() -> None:
    scheduler = make_scheduler(num_blocks=8, max_seqs=2)
    scheduler.add(scored(0, 10))
    batches = []
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        assert step is not None
        output = output_of(scheduler, step, 0)
        if step.plan.step_id % 2:
            output = with_columns(output, 4)
        batches.append(scheduler.update(step, output))
    assert told(batches) == [list(range(1, 10))]


def with_columns(output: StepOutput, count: int) -> StepOutput:
    parts = []
    for part in output.prompt_logprobs:
        token_ids, logprobs = (np.repeat(a, count, axis=1) for a in (part.values.token_ids, part.values.logprobs))
        parts.append(PromptLogprobs(part.row, part.first, Logprobs(token_ids, logprobs, part.values.ranks)))
    return msgspec.structs.replace(output, prompt_logprobs=parts)
