"""Which part of a recorded run a picture shows: a typical one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """A window of each run, all equally long, where its device idled about as much as it does over the whole run.

    Raises: ConfigError when a run has too few steady steps.
    """
    steady = [steady_decode(device_steps(profile), num_requests) for profile in profiles]
    for profile, steps in zip(profiles, steady, strict=True):
        if len(steps) < 2 * PERIODS:
            raise ConfigError(
                f"the {profile.mode} run has {len(steps)} steps in which all {num_requests} requests decode, "
                f"a picture needs {2 * PERIODS}: raise --max-tokens"
            )
    period = max(_median(b.start_ns - a.start_ns for a, b in pairwise(steps)) for steps in steady)
    gap = max(_median(b.start_ns - a.end_ns for a, b in pairwise(steps)) for steps in steady)
    zoom = min(period // 2, 2 * gap)
    return [_typical(profile, steps, PERIODS * period, zoom) for profile, steps in zip(profiles, steady, strict=True)]


def _typical(profile: Profile, steps: list[DeviceStep], length: int, zoom: int) -> Window:
    use = device_use(steps)
    candidates = []
    for first in steps:
        start = first.start_ns - length // 50
        inside = [s for s in steps if s.end_ns > start and s.start_ns < start + length]
        if steps[0].start_ns <= start and start + length <= steps[-1].end_ns:
            middle = inside[len(inside) // 2].end_ns - zoom // 5
            candidates.append(Window(profile, start, start + length, (middle, middle + zoom), inside, use))
    if not candidates:  # a step far longer than the median
        raise ConfigError(f"the {profile.mode} run is too uneven for a picture: raise --max-tokens")
    return min(candidates, key=lambda window: abs(window.idle_ns / length - (1 - use.busy)))


def _median(values: Iterable[int]) -> int:
    return round(median(values))
