"""The stages of a pipeline give the tokens of one, however early a step is planned."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from step_driver import CPU, NUM_SLOTS, StepDriver, greedy_tokens, make_config
from stepahead.config import ResolvedConfig
from stepahead.worker.async_output import AsyncOutput
from stepahead.worker.device_cpu import CpuDevice
from stepahead.worker.messages import GrammarMasks, StepOutput, StepPlan
from stepahead.worker.model_runner import ModelRunner
from stepahead.worker.models.hash_lm import HashLM
from stepahead.worker.parallel import Link, ParallelGroup, PipelineStage, Transfer
from stepahead.worker.sync_check import make_runner

pytestmark = pytest.mark.timeout(60)

STAGES = pytest.mark.parametrize("num_stages", [2, 3])


@dataclass
class Arrival:
    """A receipt that was started: wait() fills the tensor."""

    sent: queue.SimpleQueue[torch.Tensor]
    target: torch.Tensor

    def wait(self) -> None:
        self.target.copy_(self.sent.get(timeout=20))


@dataclass
class Departure:
    def wait(self) -> None:
        return None


@dataclass(frozen=True)
class QueueLink(Link):
    """Between two stages of one process. What was sent arrives in order, whenever it is asked for."""

    sent: Any = None

    def send(self, tensor: torch.Tensor) -> Transfer:
        self.sent.put(tensor.clone())
        return Transfer("send", tensor, Departure())

    def receive(self, tensor: torch.Tensor) -> Transfer:
        return Transfer("receive", tensor, Arrival(self.sent, tensor))


class AllOutputs:
    def __init__(self, outputs: list[AsyncOutput]) -> None:
        self._outputs = outputs

    def get_output(self, timeout: float | None = None) -> StepOutput:
        return [output.get_output(timeout) for output in self._outputs][-1]


class AllStages:
    """The runners of a pipeline's stages behind one face; every stage is a thread that runs ahead as it can."""

    def __init__(self, config: ResolvedConfig) -> None:
        size = config.settings.pipeline_parallel_size
        hidden = [QueueLink(0, None, queue.SimpleQueue()) for _ in range(size + 1)]
        tokens = QueueLink(0, None, queue.SimpleQueue())
        self.devices = [CpuDevice() for _ in range(size)]
        self.runners: list[ModelRunner] = []
        for index, device in enumerate(self.devices):
            stage = PipelineStage(
                index,
                size,
                before=hidden[index] if index else None,
                after=hidden[index + 1] if index < size - 1 else None,
                tokens=tokens if index in (0, size - 1) else None,
            )
            model = HashLM(config.model, torch.float32, CPU, ParallelGroup(), stage)
            self.runners.append(make_runner(config, device, model, 256, config.max_model_len, stage=stage))

    def execute(self, plan: StepPlan) -> None:
        for runner in self.runners:
            runner.execute(plan)

    def sample(self, step_id: int, grammar: GrammarMasks | None) -> AllOutputs:
        return AllOutputs([runner.sample(step_id, grammar) for runner in self.runners])

    def close(self) -> None:
        for device in self.devices:
            device.close()

    def check_first_stage(self, slots: list[int]) -> None:
        """Once nothing runs: it knows of as many tokens as the last stage, but for those it has not taken yet."""
        first, last = self.runners[0], self.runners[-1]
        assert first._pipeline is not None
        known = first._batch.num_tokens.clone()
        for step in first._pipeline._awaited:
            mine = first._pipeline._admitted_at[step.slots] <= step.number
            known[torch.from_numpy(step.slots[mine]).long()] += torch.from_numpy(step.num_sampled[mine])
        assert known[slots].tolist() == last._batch.num_tokens[slots].tolist()
        assert first._batch.num_computed[slots].tolist() == last._batch.num_computed[slots].tolist()


@contextmanager
def pipeline(num_stages: int, step_ms: float = 0.0) -> Iterator[StepDriver]:
    config = make_config(step_ms, pipeline_parallel_size=num_stages)
    driver = StepDriver(config)
    stages = AllStages(config)
    driver.runner = stages  # type: ignore[assignment]
    try:
        yield driver
    finally:
        stages.close()
        driver.close()


@STAGES
def test_rows_planned_in_every_step_get_the_tokens_of_one_stage(num_stages: int) -> None:
    prompts = {"a": [3, 1, 4, 1, 5], "b": [27], "c": [2, 7, 1, 8, 2, 8]}
    with pipeline(num_stages) as driver:
        for slot, (name, prompt) in enumerate(prompts.items()):
            driver.admit(slot, name, prompt)
        driver.run(9, depth=num_stages + 1)
        for name, prompt in prompts.items():
            assert driver.tokens[name] == greedy_tokens(prompt, 9)


@STAGES
def test_a_slots_new_owner_is_safe_from_tokens_of_the_old_one(num_stages: int) -> None:
    with pipeline(num_stages, step_ms=3) as driver:
        driver.admit(0, "stays", [5, 6])
        driver.admit(1, "old", [9, 9, 9])
        driver.start()
        driver.start({1: 1})  # its token is on its way to the first stage when the slot changes hands
        driver.free(1)
        driver.admit(1, "new", [4, 4, 4, 4])
        driver.start({0: 1, 1: 3})  # a chunk that does not finish its prefill
        driver.start({1: 1})
        driver.drain()
        driver.run(5, depth=num_stages + 1)
        driver.runner.check_first_stage([0, 1])  # type: ignore[attr-defined]
        assert driver.tokens["new"] == greedy_tokens([4, 4, 4, 4], 6)
        assert driver.tokens["stays"] == greedy_tokens([5, 6], 7)


@STAGES
def test_the_first_stage_goes_on_with_rows_that_do_not_wait(num_stages: int) -> None:
    """Prefills, which need no token, are through the first stage while the last one has not sampled any."""
    with pipeline(num_stages, step_ms=200 * num_stages) as driver:
        for slot in range(num_stages):
            driver.admit(slot, str(slot), [slot + 1, 7])
            driver.start({slot: 2})
        first_stage = driver.in_flight[-1][0]._outputs[0]  # type: ignore[attr-defined]
        last_stage = driver.in_flight[1][0]._outputs[-1]  # type: ignore[attr-defined]
        first_stage.get_output(timeout=20)
        assert not last_stage.done()
        driver.drain()


@STAGES
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_planned_comes_out_as_if_alone(num_stages: int, seed: int) -> None:
    rng = random.Random(seed)
    prompts: dict[str, list[int]] = {}
    with pipeline(num_stages) as driver:
        for _ in range(60):
            slot = rng.randrange(NUM_SLOTS)
            if slot in driver.rows and rng.random() < 0.3:
                driver.free(slot)
            if slot not in driver.rows:
                name = f"r{len(prompts)}"
                prompts[name] = [rng.randrange(1, 90) for _ in range(rng.randrange(1, 9))]
                driver.admit(slot, name, prompts[name])
                queries = {slot: rng.randrange(1, len(prompts[name]) + 1)}
            else:
                queries = {}
            for other, row in driver.rows.items():
                left = row.num_tokens - row.num_computed
                if other != slot and row.num_tokens < 50 and rng.random() < 0.6:
                    queries[other] = rng.randrange(1, left + 1)
            if not queries:
                continue
            driver.start(queries)
            while len(driver.in_flight) > rng.randrange(num_stages + 1):
                driver.finish()
        driver.drain()
        driver.runner.check_first_stage(list(driver.rows))  # type: ignore[attr-defined]
    for name, prompt in prompts.items():
        assert driver.tokens[name] == greedy_tokens(prompt, len(driver.tokens[name])), name
