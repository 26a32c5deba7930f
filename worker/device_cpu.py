"""The CPU as a device: one thread runs launched work in order, as a CUDA stream would."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType

import numpy as np
import torch

from ..errors import StepaheadError
from .device import Device, Event, T, TimedWork, share_interpreter


class _Failure:
    """The first error of launched work. Raised again by every later wait, with the frames it came from."""

    def __init__(self, error: BaseException, traceback: TracebackType | None) -> None:
        self._error = error
        self._traceback = traceback

    def throw(self) -> None:
        raise self._error.with_traceback(self._traceback)


class CpuEvent(Event):
    """A lock that is held until the stream gets here: to open it is one call, and the device thread makes it between
    two steps. then: done once, by whoever waits."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self._passed = False
        self._then = then
        self._failure: _Failure | None = None
        self._time_ns = 0

    def wait(self, timeout: float | None = None) -> None:
        if not self._passed:
            if not self._gate.acquire(timeout=-1 if timeout is None else timeout):
                raise TimeoutError(f"the device has not got there within {timeout} s")
            self._gate.release()
        if self._failure is not None:
            self._failure.throw()
        if self._then is not None:
            self._then()
            self._then = None

    def done(self) -> bool:
        return self._passed

    def time_ns(self) -> int:
        return self._time_ns

    def set(self, failure: _Failure | None) -> None:
        """Device thread: the stream has come to this event."""
        self._time_ns = time.monotonic_ns()
        self._failure = failure
        self._passed = True
        self._gate.release()


class _CpuWork(TimedWork):
    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        self._times = (0, 0)

    def __call__(self) -> None:
        """Device thread, once."""
        work, self._work = self._work, None
        assert work is not None
        start = time.monotonic_ns()
        work()
        self._times = start, time.monotonic_ns()

    def times_ns(self) -> tuple[int, int]:
        return self._times


class CpuDevice(Device):
    """Work that raises poisons the device: what follows is skipped, and every later event carries the error."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.name = "cpu"
        self._queue: queue.SimpleQueue[Callable[[], object] | CpuEvent | None] = queue.SimpleQueue()
        self._closing = False
        share_interpreter()
        self._thread = threading.Thread(target=self._run, name="stepahead-cpu-device", daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def launch_timed(self, work: Callable[[], object]) -> TimedWork:
        timed = _CpuWork(work)
        self.launch(timed)
        return timed

    def run(self, work: Callable[[], T]) -> T:
        result: Future[T] = Future()

        def fulfil() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

        self.launch(fulfil)
        self.record().wait()
        return result.result()

    def record(self) -> Event:
        event = CpuEvent()
        self._queue.put(event)
        return event

    def host_buffer(self, num_bytes: int) -> tuple[np.ndarray, torch.Tensor]:
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        return tensor.numpy(), tensor

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def copy_to_host(self, sources: Callable[[], Sequence[torch.Tensor]], targets: Sequence[torch.Tensor]) -> Event:
        """The copy stream is whoever waits for the event: the device thread goes on with the next step meanwhile."""

        @torch.inference_mode()
        def copy() -> None:
            for target, source in zip(targets, sources(), strict=True):
                target.copy_(source)

        event = CpuEvent(copy)
        self._queue.put(event)
        return event

    def close(self) -> None:
        self._closing = True
        self._queue.put(None)
        self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        failure: _Failure | None = None
        while (item := self._queue.get()) is not None:
            if self._closing and failure is None:
                failure = _Failure(StepaheadError("the device was closed before this was run"), None)
            if isinstance(item, CpuEvent):
                item.set(failure)
            elif failure is None:
                try:
                    item()
                except BaseException as error:
                    failure = _Failure(error, error.__traceback__)
            # Work closes over a step's tensors: keep none alive while the queue is empty.
            del item
