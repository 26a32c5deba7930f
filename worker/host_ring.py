"""Host memory that the device reads and writes: one entry for each step that can be in flight, plus one.

An entry goes back to the ring when its step's copy event has passed and its output has been read, and is not
handed out before. So a buffer is never filled for one step while the device still reads it for another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import StepaheadError
from .device import Device

_ALIGN = 16
_POLL_SECONDS = 0.0002
_TORCH_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.uint32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


@dataclass(frozen=True)
class Field:
    """One array inside a HostBuffer, and inside the device's copy of it."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """data: uint8 [..], the buffer or its copy. uint32 becomes int32 of the same bits."""
        part = data[self.offset : self.offset + self.num_bytes]
        return part.view(_TORCH_TYPES[self.dtype]).view(self.shape)


class HostBuffer:
    """Arrays packed one after another, so that a step needs one upload for all of them.

    The capacity is chosen so that it does not grow in steady state; when a step needs more, it does.
    """

    def __init__(self, device: Device, capacity: int) -> None:
        self._device = device
        self._used = 0
        self._array, self._tensor = device.host_buffer(capacity)

    def clear(self) -> None:
        self._used = 0

    def reserve(self, shape: Sequence[int], dtype: type[np.generic]) -> Field:
        kind = np.dtype(dtype)
        field = Field(self._used, math.prod(shape) * kind.itemsize, tuple(shape), kind)
        end = field.offset + field.num_bytes
        if end > len(self._array):
            self._grow(end)
        self._used = end + -end % _ALIGN
        return field

    def add(self, values: np.ndarray) -> Field:
        field = self.reserve(values.shape, values.dtype.type)
        np.copyto(self.array(field), values)
        return field

    def array(self, field: Field) -> np.ndarray:
        """The field's host memory; valid until the buffer grows."""
        return self._array[field.offset : field.offset + field.num_bytes].view(field.dtype).reshape(field.shape)

    def tensor(self, field: Field) -> torch.Tensor:
        return field.of(self._tensor)

    def uploader(self) -> HostUpload:
        """What launched work takes along to upload the content as it is now."""
        return HostUpload(self._device, self._tensor[: self._used])

    def _grow(self, needed: int) -> None:
        old = self._array
        self._array, self._tensor = self._device.host_buffer(max(2 * len(old), needed))
        self._array[: len(old)] = old


class HostUpload:
    """A filled HostBuffer on its way to the device. Everything but the constructor is launched work."""

    def __init__(self, device: Device, host: torch.Tensor) -> None:
        self._device = device
        self._host = host
        self._data: torch.Tensor | None = None

    def __getitem__(self, field: Field) -> torch.Tensor:
        if self._data is None:
            self._data = self._device.upload(self._host)
        return field.of(self._data)


class RingEntry:
    """One step's buffers. inputs: what the plan says. requests: what new requests bring; grows with the longest
    prompts seen. late: what is known only when it samples
    (grammar masks). outputs: where the device writes what goes back."""

    def __init__(self, device: Device, input_bytes: int, output_bytes: int) -> None:
        self.inputs = HostBuffer(device, input_bytes)
        self.requests = HostBuffer(device, 0)
        self.late = HostBuffer(device, 0)
        self.outputs = HostBuffer(device, output_bytes)
        self.step_id: int | None = None

    def release(self) -> None:
        """The device is done with this entry and its output has been read."""
        self.step_id = None


class HostRing:
    """patience: seconds that acquire waits for a step to return. 0 where the executor starts a step only when this
    rank's own outputs have made room for it; where another rank's do, the thread that reads the outputs here may lag.
    """

    def __init__(self, device: Device, depth: int, input_bytes: int, output_bytes: int, patience: float = 0.0) -> None:
        self._patience = patience
        self._entries = [RingEntry(device, input_bytes, output_bytes) for _ in range(depth)]
        self._next = 0

    def acquire(self, step_id: int) -> RingEntry:
        """Raises: StepaheadError when the entry's previous step has not returned."""
        entry = self._entries[self._next]
        if entry.step_id is not None and not self._returns(entry):
            raise StepaheadError(
                f"step {step_id} was started before step {entry.step_id} returned: "
                f"host buffers for {len(self._entries)} steps in flight, no more"
            )
        self._next = (self._next + 1) % len(self._entries)
        entry.step_id = step_id
        for buffer in (entry.inputs, entry.requests, entry.late, entry.outputs):
            buffer.clear()
        return entry

    def _returns(self, entry: RingEntry) -> bool:
        deadline = time.monotonic() + self._patience
        while entry.step_id is not None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return entry.step_id is None
