"""What a recorded run says about the device: its steps, the steady ones among them, and the gaps between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..worker.trace import DEVICE
from .profile import Profile


@dataclass(frozen=True)
class DeviceStep:
    """One step on the device. idle_ns: between its forward and its sampling, when that was launched late."""

    step_id: int
    start_ns: int
    end_ns: int
    idle_ns: int
    num_rows: int
    num_tokens: int

    @property
    def busy_ns(self) -> int:
        return self.end_ns - self.start_ns - self.idle_ns


@dataclass(frozen=True)
class DeviceUse:
    """Of consecutive steps, from the start of the first to the start of the last: whole periods only.

    busy: share of that time in which the device worked, 0 to 1. step_ms: its work a step, mean.
    gaps_us: from each step's end to the next one's start, and what it stood still inside the step.
    """

    steps: int
    steps_per_s: float
    busy: float
    step_ms: float
    gaps_us: list[float]

    @property
    def gap_us_mean(self) -> float:
        return sum(self.gaps_us) / len(self.gaps_us)

    @property
    def gap_us_p99(self) -> float:
        ordered = sorted(self.gaps_us)
        return ordered[math.ceil(0.99 * len(ordered)) - 1]


def device_steps(profile: Profile) -> list[DeviceStep]:
    """In the order in which they ran."""
    steps = []
    for forward, sample in pairwise(profile.lane(DEVICE).spans):
        if (forward.name, sample.name) == ("forward", "sample") and forward.step_id == sample.step_id:
            idle = sample.start_ns - forward.end_ns
            steps.append(
                DeviceStep(forward.step_id, forward.start_ns, sample.end_ns, idle, forward.num_rows, forward.num_tokens)
            )
    return steps


def steady_decode(steps: Sequence[DeviceStep], num_requests: int) -> list[DeviceStep]:
    """The longest stretch of steps in which every one of `num_requests` decodes one token: no prefill, no ramp, no
    tail. The first tenth of it is left out too, for queues to fill, and the last one, which nothing follows."""
    best: list[DeviceStep] = []
    stretch: list[DeviceStep] = []
    for step in steps:
        stretch = [*stretch, step] if step.num_rows == step.num_tokens == num_requests else []
        if len(stretch) > len(best):
            best = stretch
    return best[len(best) // 10 : -1]


def device_use(steps: Sequence[DeviceStep]) -> DeviceUse:
    """steps: two at least."""
    span = steps[-1].start_ns - steps[0].start_ns
    pairs = list(pairwise(steps))
    work = sum(step.busy_ns for step, _ in pairs)
    return DeviceUse(
        steps=len(pairs),
        steps_per_s=len(pairs) / span * 1e9,
        busy=work / span,
        step_ms=work / len(pairs) / 1e6,
        gaps_us=[(after.start_ns - step.end_ns + step.idle_ns) / 1e3 for step, after in pairs],
    )
