"""CUDA and CPU behind one face: an in-order compute stream, events, and a copy stream.

CPU: a device thread plays the stream, so that the worker's main thread never waits there either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


class Event(ABC):
    """A point in the compute or copy stream."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the device has passed it. Only the output-copy thread calls this in the step path.

        Raises: whatever failed on the device before it; TimeoutError.
        """

    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def time_ns(self) -> int:
        """When the device passed it, on CLOCK_MONOTONIC. Only after wait()."""


class Device(ABC):
    torch_device: torch.device
    name: str

    @abstractmethod
    def launch(self, work: Callable[[], None]) -> None:
        """Runs `work`'s device operations in order on the compute stream; does not wait for them."""

    @abstractmethod
    def record(self) -> Event:
        """An event after everything launched so far."""

    @abstractmethod
    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[np.ndarray, torch.Tensor]:
        """Pinned host memory as numpy and as torch, one memory. Allocated at start-up only."""

    @abstractmethod
    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Inside launched work: the host buffer's content on the device (CUDA: an asynchronous copy;
        CPU: the buffer itself). The caller keeps the buffer unchanged until the step's event."""

    @abstractmethod
    def copy_to_host(self, make: Callable[[], Sequence[torch.Tensor]]) -> tuple[Callable[[], list[Any]], Event]:
        """Starts copying, on the copy stream and after all launched work, the tensors that make()
        returns (called in the compute stream). The first result gives the host tensors, valid after
        the event."""
