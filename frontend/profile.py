"""A recorded run: the spans of every process, and how they are written for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from ..worker.trace import DEVICE, ENGINE_CORE, FRONT_END, OUTPUT_COPY, WORKER, LaneTrace, ProcessTrace

LANES = {
    FRONT_END: "front end",
    ENGINE_CORE: "engine core",
    WORKER: "worker, main thread",
    DEVICE: "device",
    OUTPUT_COPY: "worker, output copy",
}
"""Every lane there is, in the order of a picture, and its name for people."""

_STEP_PATH = (
    (ENGINE_CORE, "schedule"), (ENGINE_CORE, "launch"), (WORKER, "prepare"), (DEVICE, "forward"), (DEVICE, "sample"),
    (OUTPUT_COPY, "push"), (ENGINE_CORE, "update"), (FRONT_END, "process"),
)  # fmt: skip
"""The way of a step through the lanes: what the arrows follow."""


@dataclass(frozen=True)
class Profile:
    """mode: how steps were scheduled, "sync" or "async". processes: from the front end down."""

    mode: str
    processes: list[ProcessTrace]

    @property
    def start_ns(self) -> int:
        return min((span.start_ns for lane in self.lanes() for span in lane.spans), default=0)

    def lanes(self) -> Iterator[LaneTrace]:
        for process in self.processes:
            yield from process.lanes

    def lane(self, name: str) -> LaneTrace:
        """Of rank 0."""
        return next((lane for lane in self.lanes() if lane.name == name), LaneTrace(name, []))


def parse_processes(values: Any) -> list[ProcessTrace]:
    """values: as the engine core's stop_profile returns them."""
    return msgspec.convert(values, list[ProcessTrace])


def write_trace(path: str | Path, profiles: Sequence[Profile]) -> Path:
    """Writes one file for all profiles, each beginning at 0 so that they lie above each other.

    path: a file, or a folder, which gets a trace.json. Returns: the file.
    """
    path = Path(path)
    if path.suffix != ".json":
        path = path / "trace.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(profiles)))
    return path


def chrome_trace(profiles: Sequence[Profile]) -> dict[str, Any]:
    """The Trace Event Format: complete events in µs, named processes and threads, an arrow for each step's way."""
    events: list[dict[str, Any]] = []
    pid = 0
    for profile in profiles:
        threads: dict[str, tuple[int, int]] = {}
        for process in profile.processes:
            pid += 1
            events += _process_events(profile, process, pid)
            for tid, lane in enumerate(process.lanes, start=1):
                threads.setdefault(lane.name, (pid, tid))
                events += [_span_event(profile, lane, i, pid, tid) for i in range(len(lane.spans))]
        events += _arrows(profile, threads)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "CLOCK_MONOTONIC",
            "start_ns": {profile.mode: profile.start_ns for profile in profiles},
            "cut_lanes": [f"{p.mode}: {lane.name}" for p in profiles for lane in p.lanes() if lane.cut],
        },
    }


def _process_events(profile: Profile, process: ProcessTrace, pid: int) -> list[dict[str, Any]]:
    named: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"{profile.mode}: {process.name}"}),
        ("process_labels", 0, {"labels": f"pid {process.pid}"}),
        ("process_sort_index", 0, {"sort_index": pid}),
    ]
    for tid, lane in enumerate(process.lanes, start=1):
        named.append(("thread_name", tid, {"name": LANES.get(lane.name, lane.name)}))
        named.append(("thread_sort_index", tid, {"sort_index": tid}))
    return [{"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args} for name, tid, args in named]


def _span_event(profile: Profile, lane: LaneTrace, index: int, pid: int, tid: int) -> dict[str, Any]:
    span = lane.spans[index]
    args = {"step": span.step_id}
    if span.num_rows:
        args |= {"rows": span.num_rows, "tokens": span.num_tokens}
    return {
        "ph": "X",
        "name": span.name,
        "cat": lane.name,
        "ts": (span.start_ns - profile.start_ns) / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _arrows(profile: Profile, threads: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    stops: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for lane_name, span_name in _STEP_PATH:
        for span in profile.lane(lane_name).spans:
            if span.name == span_name and span.step_id:
                stops[span.step_id].append((lane_name, (span.start_ns + span.end_ns) // 2))
    events = []
    for step_id, path in stops.items():
        for place, ((start_lane, start), (end_lane, end)) in enumerate(pairwise(path)):
            common = {
                "name": "step",
                "cat": "step",
                "id": f"{profile.mode}-{step_id}-{place}",
                "args": {"step": step_id},
            }
            for phase, lane, at in (("s", start_lane, start), ("f", end_lane, end)):
                pid, tid = threads[lane]
                event = {**common, "ph": phase, "ts": (at - profile.start_ns) / 1000, "pid": pid, "tid": tid}
                events.append(event | ({"bp": "e"} if phase == "f" else {}))
    return events
