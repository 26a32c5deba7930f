"""The worker inside the engine-core process: no second process, and torch is loaded here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import ResolvedConfig
from ..errors import WorkerError
from ..worker.codec import require_plain
from ..worker.process import WORKER_CLASS, call_worker, make_worker
from .base import Executor, Future

if TYPE_CHECKING:
    from ..worker.async_output import AsyncOutput
    from ..worker.messages import GrammarMasks, StepOutput, StepPlan, WorkerInfo
    from ..worker.worker import Worker


_WAIT_SLICE = 1.0
"""Seconds between two calls of on_wait."""


class UniProcExecutor(Executor):
    """Calls go straight to the worker; only the wait for a step's tokens is put off, to result().

    What the worker raises comes as it is, from the call or from result(), not wrapped in WorkerError.
    worker_class: "package.module:Class", with the methods of `worker.Worker`.
    """

    def __init__(self, config: ResolvedConfig, worker_class: str = WORKER_CLASS) -> None:
        super().__init__(config)
        self._worker: Worker | None = make_worker(worker_class, config, rank=0)
        self._step_id = -1

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def worker_infos(self) -> Sequence[WorkerInfo]:
        return [self._alive().info()]

    def initialize_cache(self, num_blocks: int, max_model_len: int) -> None:
        self._alive().initialize_cache(num_blocks, max_model_len)

    def execute_model(self, plan: StepPlan) -> Future[None]:
        self._alive().execute_model(plan)
        self._step_id = plan.step_id
        return _LAUNCHED

    def sample_tokens(self, grammar: GrammarMasks | None) -> Future[StepOutput]:
        output = self._alive().sample_tokens(self._step_id, grammar)
        return _StepFuture(output, self._step_id, self.config.settings.step_timeout, self.on_wait)

    def collective_rpc(
        self, method: str | bytes | Callable[..., Any], args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """The worker runs in this thread, so timeout cannot interrupt it: it is not looked at."""
        worker = self._alive()
        require_plain(list(args), "an argument of collective_rpc")
        if callable(method):
            value = method(worker, *args)
        elif isinstance(method, bytes):
            value = call_worker(worker, "", list(args), method)
        else:
            value = call_worker(worker, method, list(args), None)
        require_plain(value, "the result of collective_rpc")
        return [msgspec.msgpack.decode(msgspec.msgpack.encode(value))]  # as another process would give it

    def check_health(self) -> None:
        self._alive()

    def shutdown(self) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.shutdown()

    def _alive(self) -> Worker:
        if self._worker is None:
            raise WorkerError(0, "has been shut down")
        return self._worker


class _Launched:
    """The future of a launched forward pass: it went well, or the call itself has raised."""

    def result(self) -> None:
        return None

    def done(self) -> bool:
        return True


_LAUNCHED = _Launched()


class _StepFuture:
    def __init__(self, output: AsyncOutput, step_id: int, timeout: float, on_wait: Callable[[], None]) -> None:
        self._output = output
        self._step_id = step_id
        self._timeout = timeout
        self._on_wait = on_wait

    def result(self) -> StepOutput:
        remaining = self._timeout
        deadline = time.monotonic() + remaining
        while remaining > 0:
            try:
                return self._output.get_output(timeout=min(_WAIT_SLICE, remaining))
            except TimeoutError:
                self._on_wait()
                remaining = deadline - time.monotonic()
        raise WorkerError(0, f"hung: step {self._step_id} did not end within {self._timeout:g} seconds")

    def done(self) -> bool:
        return self._output.done()
