"""Recorded runs made up by hand: steps of `step_ms` with a gap between, and the CPU's spans around them."""

from __future__ import annotations

from stepahead.frontend.profile import Profile
from stepahead.worker.trace import DEVICE, ENGINE_CORE, FRONT_END, OUTPUT_COPY, WORKER, LaneTrace, ProcessTrace, Span

MS = 1_000_000
ORIGIN = 5_000 * MS


def made_up_profile(
    mode: str = "async", steps: int = 20, step_ms: float = 5.0, gap_ms: float = 1.0, rows: int = 4
) -> Profile:
    """The first step is a prefill of 3 tokens a row. Sampling takes the last tenth of a step."""
    lanes: dict[str, list[Span]] = {name: [] for name in (FRONT_END, ENGINE_CORE, WORKER, DEVICE, OUTPUT_COPY)}
    for step_id in range(1, steps + 1):
        start = ORIGIN + round(step_id * (step_ms + gap_ms) * MS)
        middle, end = start + round(0.9 * step_ms * MS), start + round(step_ms * MS)
        planned = start - round((gap_ms if mode == "sync" else step_ms + gap_ms) * MS) + MS // 10
        size = (rows, 3 * rows if step_id == 1 else rows)
        tenth = MS // 10
        lanes[ENGINE_CORE] += [
            Span("schedule", planned, planned + tenth, step_id),
            Span("launch", planned + tenth, planned + 2 * tenth, step_id),
        ]
        lanes[WORKER] += [
            Span("prepare", planned + 2 * tenth, planned + 3 * tenth, step_id),
            Span("launch", planned + 3 * tenth, planned + 4 * tenth, step_id),
        ]
        lanes[DEVICE] += [Span("forward", start, middle, step_id, *size), Span("sample", middle, end, step_id, *size)]
        lanes[OUTPUT_COPY] += [Span("wait", start, end, step_id), Span("push", end, end + tenth // 2, step_id)]
        lanes[ENGINE_CORE].append(Span("update", end + tenth // 2, end + tenth, step_id))
        lanes[FRONT_END].append(Span("process", end + tenth, end + 2 * tenth, step_id))
    traces = {name: LaneTrace(name, sorted(spans, key=lambda span: span.start_ns)) for name, spans in lanes.items()}
    return Profile(
        mode,
        [
            ProcessTrace(FRONT_END, 10, [traces[FRONT_END]]),
            ProcessTrace(ENGINE_CORE, 11, [traces[ENGINE_CORE]]),
            ProcessTrace("worker 0", 12, [traces[WORKER], traces[DEVICE], traces[OUTPUT_COPY]]),
        ],
    )
