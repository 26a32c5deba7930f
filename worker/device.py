"""CUDA and CPU behind one face: an in-order compute stream, events, and a copy stream.

CPU: a device thread plays the stream, so that the worker's main thread never waits there either.
"Launched work" is what runs on the device: device tensors are read and written nowhere else.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from ..errors import ConfigError

T = TypeVar("T")

_SWITCH_INTERVAL = 1e-4


def share_interpreter() -> None:
    """A thread that wants the interpreter waits this long for one that computes. The default, 5 ms, is as long as a
    whole step: tokens would lie there while the next step is prepared, or the device stand still."""
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL))


class Event(ABC):
    """A point in the compute or copy stream."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the device has passed it. Only the output-copy thread calls this in the step path.

        timeout: seconds. Raises: whatever failed on the device before it; TimeoutError.
        """

    @abstractmethod
    def done(self) -> bool:
        """True when wait() would not block. Does not block, and does not raise what failed."""

    @abstractmethod
    def time_ns(self) -> int:
        """When the device passed it, on CLOCK_MONOTONIC. Only after wait()."""


class TimedWork(ABC):
    """Launched work of which the device notes when it ran."""

    @abstractmethod
    def times_ns(self) -> tuple[int, int]:
        """(start, end) on CLOCK_MONOTONIC. Only after the wait() of an event recorded later."""


class Device(ABC):
    """Methods that launch are called from one thread, the worker's main thread.

    torch_device: where tensors live. name: for people, e.g. "cpu" or "cuda (NVIDIA H200)".
    """

    torch_device: torch.device
    name: str

    @abstractmethod
    def launch(self, work: Callable[[], object]) -> None:
        """Runs `work`'s device operations in order on the compute stream; does not wait for them.

        What `work` raises comes out of a later Event.wait (CPU: it has not run yet) or of this call
        (CUDA: `work` runs here, only its kernels run later).
        """

    @abstractmethod
    def launch_timed(self, work: Callable[[], object]) -> TimedWork:
        """As launch."""

    @abstractmethod
    def run(self, work: Callable[[], T]) -> T:
        """`work` is done where launched work is, after all of it, and what it returns is returned (CUDA: its kernels
        may still run, on the compute stream). For start-up: waits. Raises: what it raises; later work goes on."""

    @abstractmethod
    def record(self) -> Event:
        """An event after everything launched so far."""

    @abstractmethod
    def host_buffer(self, num_bytes: int) -> tuple[np.ndarray, torch.Tensor]:
        """Host memory (CUDA: pinned) as numpy and as torch uint8 [num_bytes], one memory."""

    @abstractmethod
    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Inside launched work: the host buffer's content on the device (CUDA: an asynchronous copy;
        CPU: the buffer itself). The caller keeps the buffer unchanged until the step's event."""

    @abstractmethod
    def copy_to_host(self, sources: Callable[[], Sequence[torch.Tensor]], targets: Sequence[torch.Tensor]) -> Event:
        """Copies, on the copy stream and after all launched work, the tensors that sources() returns (it is called
        after that work was launched, on CPU once it has run) into the host tensors `targets`, of the same shapes and
        types. The compute stream does not wait for the copy: no later work may change these tensors.

        Returns the event after whose wait() the targets may be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Drops what has not started and gives the device back. Safe to call twice."""


def open_device(kind: str, index: int = 0) -> Device:
    """kind: "cpu", "cuda", or "auto" for CUDA where there is one. index: which of this machine's GPUs.

    Raises: ConfigError.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        from .device_cpu import CpuDevice

        return CpuDevice()
    if not torch.cuda.is_available():
        raise ConfigError(f"device={kind!r}: torch {torch.__version__} sees no CUDA device here; use device='cpu'")
    if index >= torch.cuda.device_count():
        raise ConfigError(f"local rank {index} needs a GPU of its own: this machine has {torch.cuda.device_count()}")
    from .device_cuda import CudaDevice

    return CudaDevice(index)
