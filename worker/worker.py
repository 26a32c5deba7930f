"""One device's worker: what an executor calls, in its own process or in a worker process."""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from typing import Any

import msgspec

from ..config import ResolvedConfig
from ..errors import StepaheadError
from .async_output import AsyncOutput
from .cpu_threads import share_cores
from .device import open_device
from .distributed import join_ranks, leave_ranks
from .loader import load_model
from .logs import phase
from .memory import kv_capacity
from .messages import GrammarMasks, Rendezvous, StepPlan, WorkerInfo
from .model_runner import ModelRunner
from .sync_check import make_runner
from .trace import DEVICE, OUTPUT_COPY, WORKER, Recorder
from .warm_up import run_whole_steps

logger = logging.getLogger(__name__)

_LEAVE_TIMEOUT = 2.0
"""Seconds for what several ranks have launched together to end, when the worker is told to leave."""


class Worker:
    """Every method is called from one thread, and none of the step's waits for the device.

    Construction opens the device and loads the model. Raises: ConfigError.
    rank: stage * tensor_parallel_size + rank within the stage. rendezvous: None for the only rank.
    copy_lane: of the trace, for the thread that waits for outputs.
    """

    def __init__(self, config: ResolvedConfig, rank: int = 0, rendezvous: Rendezvous | None = None) -> None:
        self.rank = rank
        self._config = config
        self._trace = Recorder(f"{WORKER} {rank}")
        self._lane = self._trace.lane(WORKER)
        self._device_lane = self._trace.lane(DEVICE)
        self.copy_lane = self._trace.lane(OUTPUT_COPY)
        self._device = open_device(config.settings.device, rendezvous.local_rank if rendezvous else 0)
        self._runner: ModelRunner | None = None
        run = self._device.run
        try:
            if self._device.torch_device.type == "cpu":
                share_cores(self._device, rendezvous.local_size if rendezvous else 1)
            with phase(logger, "finding the other ranks"):
                ranks = join_ranks(config, rank, self._device.torch_device, rendezvous)
            self._stage = ranks.stage
            with phase(logger, "loading the weights"):
                self._model = run(partial(load_model, config, self._device.torch_device, ranks.group, ranks.stage))
            self._kv_blocks = run(partial(kv_capacity, config, self._device.torch_device, self._model, self._stage))
        except BaseException:
            self._device.close()
            raise  # leaving the ranks can wait for them, and they for us: first the engine is told

    def info(self) -> WorkerInfo:
        return WorkerInfo(rank=self.rank, device=self._device.name, kv_blocks=self._kv_blocks, pid=os.getpid())

    def initialize_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocates the KV pool and the per-request state, and runs a step on no data. num_blocks: at most
        info().kv_blocks. max_model_len: in tokens. Waits; called once, before the first step."""
        with phase(logger, "allocating the KV cache"):
            arguments = (
                self._config,
                self._device,
                self._model,
                num_blocks,
                max_model_len,
                self._device_lane,
                self._stage,
            )
            self._runner = self._device.run(partial(make_runner, *arguments))
        with phase(logger, "compiling the kernels, or finding them compiled"):
            run_whole_steps(self._runner, self._config.settings.block_size, max_model_len)

    def execute_model(self, plan: StepPlan) -> None:
        """Prepares and launches the step up to its logits."""
        self._lane.begin()
        self._ready_runner().execute(plan)
        self._lane.end("prepare", plan.step_id)

    def sample_tokens(self, step_id: int, grammar: GrammarMasks | None) -> AsyncOutput:
        """Launches sampling of the step started last, and its copy to the host.

        Raises: StepaheadError when step_id is not that step.
        """
        self._lane.begin()
        output = self._ready_runner().sample(step_id, grammar)
        self._lane.end("launch", step_id)
        return output

    def start_profile(self) -> None:
        """Records what the worker's threads and the device do, until stop_profile."""
        self._trace.start()

    def stop_profile(self) -> Any:
        """Returns: a ProcessTrace in plain values."""
        return msgspec.to_builtins(self._trace.stop())

    def shutdown(self) -> None:
        """Safe to call twice."""
        if self._config.settings.world_size > 1:
            # All ranks have launched the same, and none may leave another alone in the middle of it.
            with contextlib.suppress(Exception):  # a step that failed has said so; leaving must go on
                self._device.record().wait(_LEAVE_TIMEOUT)
        self._device.close()
        leave_ranks()

    def _ready_runner(self) -> ModelRunner:
        if self._runner is None:
            raise StepaheadError("a step was started before initialize_cache")
        return self._runner
