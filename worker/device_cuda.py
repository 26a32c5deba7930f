"""One NVIDIA GPU: a compute stream, a copy stream, CUDA events."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .device import Device, Event, T, TimedWork, share_interpreter

_POLL_SECONDS = 0.0001
_CALIBRATIONS = 8
_ANCHOR_NS = 2_000_000_000


class CudaClock:
    """Turns CUDA events into CLOCK_MONOTONIC times, without asking the device to stop.

    An anchor, an event whose time is known, gives the others by `elapsed_time`. That is a float32 of
    milliseconds and the two clocks drift, so the anchor moves on every two seconds. It is then corrected by the
    smallest delay between an event and a thread's having seen it: no event can be later than its sight, and
    the fastest sight of two seconds is only microseconds late.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor_ns = 0
        self._least_delay = _ANCHOR_NS
        best = None
        for _ in range(_CALIBRATIONS):
            event = torch.cuda.Event(enable_timing=True)
            before = time.monotonic_ns()
            event.record()
            event.synchronize()
            after = time.monotonic_ns()
            if best is None or after - before < best:
                best, self._anchor, self._anchor_ns = after - before, event, (before + after) // 2

    def time_ns(self, event: torch.cuda.Event) -> int:
        """event: passed, with timing."""
        with self._lock:
            return self._time_ns(event)

    def saw(self, event: torch.cuda.Event) -> None:
        """The calling thread has just seen that `event` passed."""
        now = time.monotonic_ns()
        with self._lock:
            passed = self._time_ns(event)
            self._least_delay = min(self._least_delay, now - passed)
            if passed - self._anchor_ns > _ANCHOR_NS:
                self._anchor, self._anchor_ns = event, passed + self._least_delay
                self._least_delay = _ANCHOR_NS

    def _time_ns(self, event: torch.cuda.Event) -> int:
        return self._anchor_ns + int(self._anchor.elapsed_time(event) * 1e6)


class CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream, clock: CudaClock) -> None:
        # blocking: a waiting thread sleeps instead of spinning on one of the host's cores.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record(stream)
        self._clock = clock

    def wait(self, timeout: float | None = None) -> None:
        if timeout is None:
            self._event.synchronize()
        else:
            deadline = time.monotonic() + timeout
            while not self._event.query():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the device has not got there within {timeout} s")
                time.sleep(_POLL_SECONDS)
        self._clock.saw(self._event)

    def done(self) -> bool:
        try:
            return self._event.query()
        except RuntimeError:
            # The device failed: wait() does not block, it raises this.
            return True

    def time_ns(self) -> int:
        return self._clock.time_ns(self._event)


class _CudaWork(TimedWork):
    def __init__(self, start: CudaEvent, end: CudaEvent) -> None:
        self._start = start
        self._end = end

    def times_ns(self) -> tuple[int, int]:
        return self._start.time_ns(), self._end.time_ns()


class CudaDevice(Device):
    """Work runs on the calling thread, its kernels on the compute stream."""

    def __init__(self, index: int = 0) -> None:
        share_interpreter()
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.name = f"cuda ({torch.cuda.get_device_name(self.torch_device)})"
        self._compute = torch.cuda.Stream(self.torch_device)
        self._copy = torch.cuda.Stream(self.torch_device)
        # Start-up work on this thread (weights, caches) is then in order with the steps.
        torch.cuda.set_stream(self._compute)
        self._clock = CudaClock()

    def launch(self, work: Callable[[], object]) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._compute):
            work()

    def launch_timed(self, work: Callable[[], object]) -> TimedWork:
        start = CudaEvent(self._compute, self._clock)
        self.launch(work)
        return _CudaWork(start, CudaEvent(self._compute, self._clock))

    def run(self, work: Callable[[], T]) -> T:
        with torch.cuda.stream(self._compute):
            return work()

    def record(self) -> Event:
        return CudaEvent(self._compute, self._clock)

    def host_buffer(self, num_bytes: int) -> tuple[np.ndarray, torch.Tensor]:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return tensor.numpy(), tensor

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.torch_device, non_blocking=True)

    def copy_to_host(self, sources: Callable[[], Sequence[torch.Tensor]], targets: Sequence[torch.Tensor]) -> Event:
        with torch.inference_mode(), torch.cuda.stream(self._compute):
            tensors = sources()
        self._copy.wait_stream(self._compute)
        with torch.inference_mode(), torch.cuda.stream(self._copy):
            for target, source in zip(targets, tensors, strict=True):
                target.copy_(source, non_blocking=True)
                # Its memory may be given to later compute work only once this copy has read it.
                source.record_stream(self._copy)
        return CudaEvent(self._copy, self._clock)

    def close(self) -> None:
        # A device that failed has said so in every wait; shutting down must go on.
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self.torch_device)
