"""The device on paper behind the real executors: a worker without torch, so that a process starts at once."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from paper_device import PaperExecutor, paper_config
from stepahead.config import ResolvedConfig
from stepahead.engine_core.messages import (
    AddRequest,
    EngineFailed,
    EngineMessage,
    EngineRequest,
    FinishedRequest,
    OutputBatch,
)
from stepahead.errors import ConfigError
from stepahead.executor.external import ExternalExecutor
from stepahead.executor.multiproc import MultiprocExecutor
from stepahead.executor.uniproc import UniProcExecutor
from stepahead.frontend.engine_client import EngineClient
from stepahead.worker.messages import GrammarMasks, Rendezvous, SamplingOptions, StepOutput, StepPlan, WorkerInfo
from stepahead.worker.trace import OUTPUT_COPY, Lane


class PaperOutput:
    """An AsyncOutput that takes `delay` seconds."""

    def __init__(self, output: StepOutput, delay: float) -> None:
        self._output = output
        self._ready_at = time.monotonic() + delay

    @property
    def step_id(self) -> int:
        return self._output.step_id

    def get_output(self, timeout: float | None = None) -> StepOutput:
        remaining = self._ready_at - time.monotonic()
        if timeout is not None and remaining > timeout:
            raise TimeoutError
        time.sleep(max(0.0, remaining))
        return self._output

    def done(self) -> bool:
        return time.monotonic() >= self._ready_at


class PaperWorker:
    """delay: seconds a step takes on the device, from the model's step_ms."""

    def __init__(self, config: ResolvedConfig, rank: int = 0, rendezvous: Rendezvous | None = None) -> None:
        self.rank = rank
        self.delay = config.model.step_ms / 1000
        self.device = PaperExecutor(config)
        self.copy_lane = Lane(OUTPUT_COPY)

    def info(self) -> WorkerInfo:
        blocks = self.device.config.settings.num_kv_blocks or 64
        return WorkerInfo(rank=self.rank, device="paper", kv_blocks=blocks, pid=os.getpid())

    def initialize_cache(self, num_blocks: int, max_model_len: int) -> None:
        self.device.initialize_cache(num_blocks, max_model_len)

    def execute_model(self, plan: StepPlan) -> None:
        self.device.execute_model(plan)

    def sample_tokens(self, step_id: int, grammar: GrammarMasks | None) -> PaperOutput:
        output = self.device.sample_tokens(grammar).value
        assert isinstance(output, StepOutput)
        assert output.step_id == step_id
        return PaperOutput(output, self.delay)

    def shutdown(self) -> None:
        return None

    # ---- what tests call ------------------------------------------------------------------------

    def add(self, a: int, b: int) -> int:
        return a + b

    def explode(self, message: str) -> None:
        raise ValueError(message)

    def refuse(self, message: str) -> None:
        raise ConfigError(message)

    def array(self) -> Any:
        return np.zeros(3)


class BadWorker(PaperWorker):
    def __init__(self, config: ResolvedConfig, rank: int = 0, rendezvous: Rendezvous | None = None) -> None:
        raise RuntimeError("this worker cannot start")


class HalfBadWorker(PaperWorker):
    def __init__(self, config: ResolvedConfig, rank: int = 0, rendezvous: Rendezvous | None = None) -> None:
        if rank == 1:
            raise RuntimeError("this worker cannot start")
        time.sleep(60)


class RefusingWorker(PaperWorker):
    def __init__(self, config: ResolvedConfig, rank: int = 0, rendezvous: Rendezvous | None = None) -> None:
        raise ConfigError("model='nowhere': no such folder")


class DyingWorker(PaperWorker):
    def __init__(self, config: ResolvedConfig, rank: int = 0, rendezvous: Rendezvous | None = None) -> None:
        os._exit(7)


class SlowWorker(PaperWorker):
    def __init__(self, config: ResolvedConfig, rank: int = 0, rendezvous: Rendezvous | None = None) -> None:
        time.sleep(60)


class PaperMultiproc(MultiprocExecutor):
    worker = "PaperWorker"

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config, worker_class=f"paper_worker:{self.worker}")


class BadMultiproc(PaperMultiproc):
    worker = "BadWorker"


class HalfBadMultiproc(PaperMultiproc):
    worker = "HalfBadWorker"


class RefusingMultiproc(PaperMultiproc):
    worker = "RefusingWorker"


class DyingMultiproc(PaperMultiproc):
    worker = "DyingWorker"


class SlowMultiproc(PaperMultiproc):
    worker = "SlowWorker"


class PaperExternal(ExternalExecutor):
    """addresses: gets where workers are to connect, as soon as the executor waits for them."""

    addresses: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config, worker_class="paper_worker:PaperWorker")

    def _start_workers(self, address: str) -> None:
        super()._start_workers(address)
        self.addresses.put(address)


def open_paper_external(pool: ThreadPoolExecutor, **settings: Any) -> tuple[Future[PaperExternal], str]:
    """An executor that is being made until its workers have come, and where they are to connect."""
    future = pool.submit(PaperExternal, paper_config(executor="paper_worker:PaperExternal", **settings))
    return future, PaperExternal.addresses.get(timeout=15)


def made_paper_external(future: Future[PaperExternal]) -> PaperExternal:
    """Waits for it. Ready to run plans."""
    executor = future.result(timeout=15)
    executor.initialize_cache(executor.worker_infos()[0].kv_blocks, executor.config.max_model_len)
    return executor


class PaperUni(UniProcExecutor):
    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config, worker_class="paper_worker:PaperWorker")


class Inbox:
    """An on_message that keeps what came."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, FinishedRequest] = {}
        self.failures: list[EngineFailed] = []
        self._changed = threading.Condition()

    def __call__(self, message: EngineMessage) -> None:
        with self._changed:
            if isinstance(message, EngineFailed):
                self.failures.append(message)
            elif isinstance(message, OutputBatch):
                tokens = iter(message.tokens.tolist())
                for request_id, count in zip(message.request_ids.tolist(), message.counts.tolist(), strict=True):
                    self.tokens[request_id] += itertools.islice(tokens, count)
                self.finished.update((finished.request_id, finished) for finished in message.finished)
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[Inbox], Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), timeout=15)

    def failure(self) -> EngineFailed:
        self.wait_for(lambda inbox: inbox.failures)
        return self.failures[0]


def client_for(executor: str = "PaperMultiproc", step_ms: float = 0.0, **settings: Any) -> tuple[EngineClient, Inbox]:
    config = paper_config(executor=f"paper_worker:{executor}", **settings)
    model = msgspec.structs.replace(config.model, step_ms=step_ms)
    inbox = Inbox()
    return EngineClient(msgspec.structs.replace(config, model=model), inbox), inbox


def request(request_id: int, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 8) -> AddRequest:
    options = SamplingOptions(seed=0, temperature=0.0)
    prompt_ids = np.array(prompt, np.int32)
    return AddRequest(EngineRequest(request_id=request_id, prompt=prompt_ids, options=options, max_tokens=max_tokens))
