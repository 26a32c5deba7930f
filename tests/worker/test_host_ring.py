"""Host buffers are packed exactly, and never handed out while a step may still use them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from stepahead.errors import StepaheadError
from stepahead.worker.device_cpu import CpuDevice
from stepahead.worker.host_ring import HostBuffer, HostRing


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


def sample_arrays() -> list[np.ndarray]:
    return [
        np.arange(5, dtype=np.int32),
        np.array([], np.int64),
        np.array([-(2**62), 2**62], np.int64),
        np.array([[0.5, -1.5, 3.0]], np.float32),
        np.array([2**32 - 1, 1], np.uint32),
    ]


@pytest.mark.parametrize("capacity", [0, 8, 4096])
def test_what_was_added_comes_out_on_the_device(device: CpuDevice, capacity: int) -> None:
    buffer = HostBuffer(device, capacity)
    for _ in range(2):
        buffer.clear()
        fields = [buffer.add(a) for a in sample_arrays()]
        upload = buffer.uploader()
        for array, field in zip(sample_arrays(), fields, strict=True):
            expected = array.view(np.int32) if array.dtype == np.uint32 else array
            assert torch.equal(upload[field], torch.from_numpy(expected))


def test_read_only_arrays_can_be_added(device: CpuDevice) -> None:
    array = np.frombuffer(np.arange(3, dtype=np.int32).tobytes(), np.int32)
    buffer = HostBuffer(device, 64)
    field = buffer.add(array)
    assert buffer.uploader()[field].tolist() == [0, 1, 2]


def test_an_entry_is_not_handed_out_before_its_step_has_returned(device: CpuDevice) -> None:
    ring = HostRing(device, depth=2, input_bytes=64, output_bytes=64)
    first, second = ring.acquire(0), ring.acquire(1)
    with pytest.raises(StepaheadError, match="step 2 was started before step 0 returned"):
        ring.acquire(2)
    second.release()
    with pytest.raises(StepaheadError, match="before step 0"):
        ring.acquire(2)
    first.release()
    assert ring.acquire(2) is first


def test_entries_share_no_memory(device: CpuDevice) -> None:
    ring = HostRing(device, depth=3, input_bytes=64, output_bytes=64)
    arrays = []
    for step in range(3):
        entry = ring.acquire(step)
        for buffer in (entry.inputs, entry.late, entry.outputs):
            arrays.append(buffer.array(buffer.add(np.arange(8, dtype=np.int32))))
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
