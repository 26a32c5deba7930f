"""What each thread did, and when: spans on CLOCK_MONOTONIC, which every process of a machine reads alike.

Nothing is recorded between stop() and start(); what is left then is one attribute check a span. Importing this
loads no torch.
"""

from __future__ import annotations

import os
from collections import deque
from time import monotonic_ns
from typing import Any

import msgspec

MAX_SPANS = 200_000
"""A lane keeps its latest: hours of recording do not fill the memory."""

ENGINE_CORE = "engine core"
WORKER = "worker"
DEVICE = "device"
OUTPUT_COPY = "output copy"
FRONT_END = "front end"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """step_id: 0 for none. num_rows, num_tokens: of the step; a lane that does not know them says 0."""

    name: str
    start_ns: int
    end_ns: int
    step_id: int = 0
    num_rows: int = 0
    num_tokens: int = 0


class LaneTrace(msgspec.Struct, frozen=True):
    """One thread's spans in order, or the device's. cut: the first ones are missing, there were too many."""

    name: str
    spans: list[Span]
    cut: bool = False


class ProcessTrace(msgspec.Struct, frozen=True):
    name: str
    pid: int
    lanes: list[LaneTrace]


class Lane:
    """Used by one thread. enabled: read it before working out what to record."""

    __slots__ = ("_began", "_spans", "enabled", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.enabled = False
        self._began = 0
        self._spans: deque[tuple[Any, ...]] = deque(maxlen=MAX_SPANS)

    def begin(self) -> None:
        if self.enabled:
            self._began = monotonic_ns()

    def end(self, name: str, step_id: int) -> None:
        """Records what ran since begin(), or since the last end()."""
        if self.enabled and self._began:
            now = monotonic_ns()
            self._spans.append((name, self._began, now, step_id))
            self._began = now

    def add(self, name: str, start_ns: int, end_ns: int, step_id: int, num_rows: int, num_tokens: int) -> None:
        """Records a span of which the times are known."""
        if self.enabled:
            self._spans.append((name, start_ns, end_ns, step_id, num_rows, num_tokens))

    def start(self) -> None:
        self._began = 0
        self._spans.clear()
        self.enabled = True

    def stop(self) -> LaneTrace:
        self.enabled = False
        rows = list(self._spans)
        self._spans.clear()
        return LaneTrace(self.name, msgspec.convert(rows, list[Span]), len(rows) == MAX_SPANS)


class Recorder:
    """The lanes of one process. name: for people."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lanes: list[Lane] = []

    def lane(self, name: str) -> Lane:
        lane = Lane(name)
        self._lanes.append(lane)
        return lane

    def start(self) -> None:
        """Records from now on. What an earlier start() recorded and nobody took is forgotten."""
        for lane in self._lanes:
            lane.start()

    def stop(self) -> ProcessTrace:
        return ProcessTrace(self._name, os.getpid(), [lane.stop() for lane in self._lanes])
