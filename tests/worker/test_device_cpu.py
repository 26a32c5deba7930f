"""The CPU device keeps a stream's promises."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from stepahead.errors import ConfigError
from stepahead.worker.device import open_device
from stepahead.worker.device_cpu import CpuDevice


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


def test_work_runs_in_the_order_of_its_launches(device: CpuDevice) -> None:
    seen: list[int] = []
    for i in range(200):
        device.launch(lambda i=i: seen.append(i))
    device.record().wait(10)
    assert seen == list(range(200))


def test_launch_and_record_return_before_the_work_is_done(device: CpuDevice) -> None:
    gate = threading.Event()
    device.launch(partial(gate.wait, 10))
    event = device.record()
    assert not event.done()
    with pytest.raises(TimeoutError):
        event.wait(0.01)
    gate.set()
    event.wait(10)
    assert event.done()


def test_work_runs_without_autograd(device: CpuDevice) -> None:
    modes: list[bool] = []
    device.launch(lambda: modes.append(torch.is_inference_mode_enabled()))
    device.record().wait(10)
    assert modes == [True]


def test_events_carry_the_time_at_which_the_device_passed_them(device: CpuDevice) -> None:
    before = time.monotonic_ns()
    first = device.record()
    device.launch(lambda: time.sleep(0.02))
    second = device.record()
    second.wait(10)
    assert before <= first.time_ns()
    assert second.time_ns() - first.time_ns() >= 20_000_000
    assert second.time_ns() <= time.monotonic_ns()


def test_failed_work_raises_in_every_later_wait_with_its_own_traceback(device: CpuDevice) -> None:
    def broken_work() -> None:
        raise ValueError("slot 7 is on fire")

    before = device.record()
    device.launch(broken_work)
    for event in (device.record(), device.record()):
        with pytest.raises(ValueError, match="slot 7") as caught:
            event.wait(10)
        assert "broken_work" in "".join(traceback.format_tb(caught.value.__traceback__))
        assert event.done()
    before.wait(10)


def test_work_after_a_failure_is_skipped(device: CpuDevice) -> None:
    seen: list[int] = []
    device.launch(lambda: torch.zeros(1)[5])
    device.launch(lambda: seen.append(1))
    with pytest.raises(IndexError):
        device.record().wait(10)
    assert seen == []


def test_copy_to_host_comes_after_launched_work_and_delays_no_later_work(device: CpuDevice) -> None:
    state, target = torch.zeros(4), torch.empty(4)
    device.launch(partial(state.fill_, 1.0))
    copied = device.copy_to_host(lambda: [state], [target])
    later = device.record()
    later.wait(10)
    copied.wait(10)
    copied.wait(10)
    assert target.tolist() == [1.0] * 4


def test_a_copy_that_fails_says_so_in_every_wait(device: CpuDevice) -> None:
    copied = device.copy_to_host(lambda: [torch.zeros(2)], [torch.empty(3)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size of tensor"):
            copied.wait(10)


def test_run_returns_what_the_device_thread_computed(device: CpuDevice) -> None:
    seen: list[str] = []
    device.launch(lambda: seen.append(threading.current_thread().name))
    assert device.run(lambda: [*seen, threading.current_thread().name]) == ["stepahead-cpu-device"] * 2


def test_what_fails_in_run_is_the_callers_alone(device: CpuDevice) -> None:
    with pytest.raises(ZeroDivisionError):
        device.run(lambda: 1 / 0)
    assert device.run(lambda: 3) == 3


def test_run_on_a_device_that_has_failed_raises_that(device: CpuDevice) -> None:
    device.launch(lambda: torch.zeros(1)[5])
    with pytest.raises(IndexError):
        device.run(lambda: 3)


def test_close_drops_what_has_not_started_and_ends_the_thread() -> None:
    device, gate, seen = CpuDevice(), threading.Event(), []
    device.launch(partial(gate.wait, 10))
    device.launch(lambda: seen.append(1))
    threading.Timer(0.05, gate.set).start()
    device.close()
    device.close()
    assert seen == []
    assert "stepahead-cpu-device" not in [t.name for t in threading.enumerate()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_asking_for_cuda_where_there_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="device='cpu'"):
        open_device("cuda")
