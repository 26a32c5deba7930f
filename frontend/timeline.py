"""Draws recorded runs: a row a run, a lane a thread, the device's gaps marked. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..worker.trace import DEVICE, ENGINE_CORE, FRONT_END, OUTPUT_COPY, WORKER, Span
from .timeline_window import Window

_COLOURS = ("#3B75AF", "#E8912D", "#4E9F50", "#A5628F")
"""By step, in turn: a step keeps its colour in every lane, and the next one's differs."""

_IDLE = "#D62728"
_LANES = {
    FRONT_END: "front end\n(text out)",
    ENGINE_CORE: "engine core\n(plans steps)",
    WORKER: "worker\n(launches)",
    DEVICE: "DEVICE",
    OUTPUT_COPY: "output copy\n(tokens back)",
}
_HEADLINES = {
    "sync": "Without overlap: the device stands idle until the CPU has taken in step N and planned step N+1.",
    "async": "stepahead's default: while the device runs a step, the CPU has the next one planned and launched.",
}
_ENLARGED = {
    "sync": "enlarged: {0} ends, {1} is planned only then",
    "async": "enlarged: {1} follows {0} at once, {2} is planned meanwhile",
}
"""Of a step and the two after it."""

_HEIGHT = 0.74
_POINTS_A_LETTER = 0.62
"""Of the font size."""


def draw_timeline(windows: Sequence[Window], title: str, folder: Path) -> list[Path]:
    """Writes timeline.png and timeline.svg. Raises: ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing the timeline needs matplotlib: install stepahead with its extra `trace`") from None
    figure = Figure(figsize=(14, 3.75 * len(windows) + 1.1))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.06, w_pad=0.06, hspace=0.04)
    figure.suptitle(title, fontsize=16, fontweight="bold", x=0.008, ha="left")
    rows = figure.subfigures(len(windows), 1, squeeze=False)[:, 0]
    for row, window in zip(rows, windows, strict=True):
        _draw_run(row, window)
    _legend(figure)
    paths = [folder / "timeline.png", folder / "timeline.svg"]
    for path in paths:
        figure.savefig(path, dpi=120)
    return paths


def _draw_run(row: Any, window: Window) -> None:
    mode, whole = window.profile.mode, window.whole
    idle, length = window.idle_ns / 1e6, window.length_ns / 1e6
    row.suptitle(f"{mode}   {_HEADLINES[mode]}", fontsize=13, fontweight="bold", x=0.008, ha="left")
    wide, zoomed = row.subplots(1, 2, width_ratios=(1.45, 1))
    zoom_start, zoom_end = window.zoom_ns
    _Panel(wide, window, window.start_ns, window.end_ns).draw(lane_names=True)
    _Panel(zoomed, window, zoom_start, zoom_end).draw(lane_names=False)
    wide.set_title(
        f"device idle {idle / length:.1%} = {idle:.2f} ms of these {length:.1f} ms  "
        f"({1 - whole.busy:.1%} over {whole.steps} steps, {whole.steps_per_s:.1f} steps/s)",
        loc="left", fontsize=11.5, color=_IDLE,
    )  # fmt: skip
    step = next(step.step_id for step in window.steps if step.end_ns > zoom_start)
    zoomed.set_title(_ENLARGED[mode].format(step, step + 1, step + 2), loc="left", fontsize=11.5)
    _mark_zoom(row, wide, zoomed, (zoom_start - window.start_ns) / 1e6, (zoom_end - window.start_ns) / 1e6)


def _mark_zoom(row: Any, wide: Any, zoomed: Any, start: float, end: float) -> None:
    from matplotlib.patches import ConnectionPatch

    bottom, top = wide.get_ylim()
    wide.axvspan(start, end, facecolor="#FFF3B0", edgecolor="#999999", linewidth=0.8, zorder=-1)
    zoomed.set_facecolor("#FFFBE6")
    for y in (bottom, top):
        line = ConnectionPatch(
            (end, y), (0, y), "data", "data", axesA=wide, axesB=zoomed, color="#999999", linewidth=0.8
        )
        row.add_artist(line)
        line.set_in_layout(False)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Any] = [Patch(color=colour) for colour in _COLOURS[:3]]
    names = ["step N", "step N+1", "step N+2: a step has one colour in all lanes"]
    entries += [Line2D([], [], color="#777777", linewidth=2.5), Patch(facecolor="white", edgecolor=_IDLE, hatch="////")]
    names += ["waiting", "the device is idle"]
    figure.legend(entries, names, loc="outside lower center", ncols=len(names), fontsize=11.5, frameon=False)


class _Panel:
    """A stretch of a run. Places are in milliseconds from its start."""

    def __init__(self, axes: Any, window: Window, start_ns: int, end_ns: int) -> None:
        self._axes = axes
        self._window = window
        self._start_ns = start_ns
        self._end_ns = end_ns
        self._width = (end_ns - start_ns) / 1e6
        self._rows = {name: len(_LANES) - 1 - place for place, name in enumerate(_LANES)}

    def draw(self, lane_names: bool) -> None:
        axes = self._axes
        axes.set_xlim(0, self._width)
        axes.set_ylim(-0.55, len(_LANES) - 0.45)
        axes.set_yticks(list(self._rows.values()), list(_LANES.values()) if lane_names else [""] * len(_LANES))
        axes.tick_params(axis="y", length=0, labelsize=11.5)
        axes.tick_params(axis="x", labelsize=10.5)
        axes.get_yticklabels()[list(_LANES).index(DEVICE)].set_fontweight("bold")
        axes.set_xlabel("milliseconds", fontsize=10.5)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        for row in self._rows.values():
            axes.axhline(row, color="#DDDDDD", linewidth=0.6, zorder=0)
        for lane in _LANES:
            for span in self._spans(lane):
                self._bar(lane, span)
        for start, end in self._window.gaps():
            if end > self._start_ns and start < self._end_ns:
                self._gap(start, end)

    def _spans(self, lane: str) -> Iterator[Span]:
        for span in self._window.profile.lane(lane).spans:
            if span.step_id and span.end_ns > self._start_ns and span.start_ns < self._end_ns:
                yield span

    def _at(self, time_ns: int) -> float:
        return min(max((time_ns - self._start_ns) / 1e6, 0.0), self._width)

    def _bar(self, lane: str, span: Span) -> None:
        start, end, row = self._at(span.start_ns), self._at(span.end_ns), self._rows[lane]
        colour = _COLOURS[span.step_id % len(_COLOURS)]
        if span.name == "wait":
            self._axes.plot([start, end], [row, row], color=colour, linewidth=2.5, alpha=0.5, solid_capstyle="butt")
            return
        number = str(span.step_id)
        texts = f"{span.name} {number}", f"{span.name}\n{number}"
        text, size = "", 12.0
        if lane == DEVICE:
            text = self._fitting(end - start, size, *texts)
        if not text:
            size = 8.5
            text = self._fitting(end - start, size, *texts, number)
        edge = "white" if text else colour  # a white edge would hide a narrow bar
        self._axes.barh(row, end - start, left=start, height=_HEIGHT, color=colour, edgecolor=edge, linewidth=0.7)
        self._axes.text(
            (start + end) / 2, row, text, ha="center", va="center", fontsize=size, color="white", fontweight="bold"
        )

    def _gap(self, start_ns: int, end_ns: int) -> None:
        start, end, row = self._at(start_ns), self._at(end_ns), self._rows[DEVICE]
        self._axes.barh(
            row,
            end - start,
            left=start,
            height=_HEIGHT,
            facecolor="white",
            edgecolor=_IDLE,
            hatch="////",
            linewidth=0.9,
        )
        length = (end_ns - start_ns) / 1e6
        text = self._fitting(end - start, 9.0, f"idle {length:.2f} ms", f"{length:.1f}")
        self._axes.text(
            (start + end) / 2, row, text, ha="center", va="center", fontsize=9.0, color=_IDLE, fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0} if text else None,
        )  # fmt: skip

    def _fitting(self, width: float, size: float, *texts: str) -> str:
        """The first text that a bar `width` ms wide has room for, or none."""
        box = self._axes.get_window_extent()
        points = width / self._width * box.width / self._axes.figure.dpi * 72
        letters = points / size / _POINTS_A_LETTER
        return next((text for text in texts if max(map(len, text.split("\n"))) < letters), "")
