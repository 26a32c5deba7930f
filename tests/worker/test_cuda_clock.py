"""CUDA event times land on CLOCK_MONOTONIC. A counterfeit of CUDA's events, so that it runs anywhere."""

from __future__ import annotations

import time

import pytest
import torch

from stepahead.worker.device_cuda import CudaClock

SECOND = 1_000_000_000


class FakeGpu:
    """Host time in ns, and a device clock that starts elsewhere and runs at `rate`."""

    def __init__(self, rate: float = 1.0) -> None:
        self.now = 5 * SECOND
        self.rate = rate

    def monotonic_ns(self) -> int:
        return self.now

    def make_event(self, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.host_ns = 0

    def record(self, stream: object = None) -> None:
        self.host_ns = self.gpu.now

    def synchronize(self) -> None:
        self.gpu.now += 8_000

    def elapsed_time(self, other: FakeEvent) -> float:
        milliseconds = (other.host_ns - self.host_ns) * self.gpu.rate / 1e6
        return torch.tensor(milliseconds, dtype=torch.float32).item()


def clock_on(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> CudaClock:
    monkeypatch.setattr(torch.cuda, "Event", gpu.make_event)
    monkeypatch.setattr(time, "monotonic_ns", gpu.monotonic_ns)
    return CudaClock()


def follow(clock: CudaClock, gpu: FakeGpu, steps: int, step_ns: int) -> int:
    """Runs steps whose events are seen 10 to 60 us late; returns the largest error of their times."""
    worst = 0
    for i in range(steps):
        gpu.now += step_ns
        event = gpu.make_event()
        event.record()
        gpu.now += 10_000 + (i * 7919) % 50_000
        clock.saw(event)  # type: ignore[arg-type]
        worst = max(worst, abs(clock.time_ns(event) - event.host_ns))  # type: ignore[arg-type]
    return worst


def test_times_are_right_to_microseconds_from_the_first_event_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    assert follow(clock_on(gpu, monkeypatch), gpu, steps=50, step_ns=10_000_000) < 10_000


@pytest.mark.parametrize("rate", [1.0, 1.00002, 0.99998])
def test_a_day_of_drifting_clocks_does_not_show(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    gpu = FakeGpu(rate)
    assert follow(clock_on(gpu, monkeypatch), gpu, steps=20_000, step_ns=4 * SECOND) < 250_000
