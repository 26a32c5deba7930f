"""Which part of a recorded run a picture shows: a typical one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ..errors import ConfigError
from .device_use import DeviceStep, DeviceUse, device_steps, device_use, steady_decode
from .profile import Profile

PERIODS = 4
"""How many steps of the slower run a picture is wide."""


@dataclass(frozen=True)
class Window:
    """A part of a run in steady decode. steps: those on the device that touch it. whole: of all the steady steps.
    zoom_ns: (start, end) of a smaller part, around the end of a step."""

    profile: Profile
    start_ns: int
    end_ns: int
    zoom_ns: tuple[int, int]
    steps: list[DeviceStep]
    whole: DeviceUse

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns

    def gaps(self) -> list[tuple[int, int]]:
        """(start_ns, end_ns) of the times in which the device had no step."""
        edges = [self.start_ns, *(time for step in self.steps for time in (step.start_ns, step.end_ns)), self.end_ns]
        gaps = [(max(a, self.start_ns), min(b, self.end_ns)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        return [(a, b) for a, b in gaps if b > a]

    @property
    def idle_ns(self) -> int:
        return sum(b - a for a, b in self.gaps()) + sum(step.idle_ns for step in self.steps)


def windows_of(profiles: Sequence[Profile], num_requests: int) -> list[Window]:
    """A typical window of each run, all equally long.

    Raises: ConfigError when a run has too few steady steps.
    """
    steady = [steady_decode(device_steps(profile), num_requests) for profile in profiles]
    for profile, steps in zip(profiles, steady, strict=True):
        if len(steps) < 2 * PERIODS:
            raise ConfigError(
                f"the {profile.mode} run has {len(steps)} steps in which all {num_requests} requests decode, "
                f"a picture needs {2 * PERIODS}: raise --max-tokens"
            )
    length = PERIODS * max(map(_period, steady))
    zoom = min(length // PERIODS // 2, 2 * max(map(_gap, steady)))
    return [_typical(profile, steps, length, zoom) for profile, steps in zip(profiles, steady, strict=True)]


def _typical(profile: Profile, steps: list[DeviceStep], length: int, zoom: int) -> Window:
    """Of those that begin shortly before a step: the one most like the others in idle time and in number of steps."""
    use, windows = device_use(steps), []
    for first in steps:
        start = first.start_ns - length // 50
        inside = [s for s in steps if s.end_ns > start and s.start_ns < start + length]
        if len(inside) >= PERIODS and steps[0].start_ns <= start and start + length <= steps[-1].end_ns:
            windows.append(Window(profile, start, start + length, _zoom(inside, _gap(steps), zoom), inside, use))
    if not windows:
        raise ConfigError(f"the {profile.mode} run is too uneven for a picture: raise --max-tokens")
    idle, count = median(w.idle_ns for w in windows), median(len(w.steps) for w in windows)
    return min(windows, key=lambda w: abs(w.idle_ns - idle) / length + abs(len(w.steps) - count) / count)


def _zoom(steps: Sequence[DeviceStep], typical_gap: int, length: int) -> tuple[int, int]:
    """Around the end of the step whose gap to the next is the most typical, in the middle if there are several."""
    middle = len(steps) // 2
    inner = sorted(pairwise(steps[1:-1]), key=lambda pair: abs(pair[0].step_id - steps[middle].step_id))
    end = min(inner, key=lambda pair: abs(pair[1].start_ns - pair[0].end_ns - typical_gap))[0].end_ns
    return end - length // 5, end - length // 5 + length


def _period(steps: Sequence[DeviceStep]) -> int:
    return round(median(b.start_ns - a.start_ns for a, b in pairwise(steps)))


def _gap(steps: Sequence[DeviceStep]) -> int:
    return round(median(b.start_ns - a.end_ns for a, b in pairwise(steps)))
