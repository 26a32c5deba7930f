"""The picture shows a typical part of each run, says how long the device idled, and never costs the recording."""

from __future__ import annotations

import json
import re
import sys

import pytest

from hash_model import write_hash_model
from recordings import MS, made_up_profile
from stepahead.errors import ConfigError
from stepahead.frontend import cli
from stepahead.frontend.timeline import draw_timeline
from stepahead.frontend.timeline_window import PERIODS, windows_of


def made_up_runs(steps: int = 20):
    return [made_up_profile("sync", steps, gap_ms=1.0), made_up_profile("async", steps, gap_ms=0.1)]


def test_windows_are_equally_long_and_some_steps_of_the_slower_run_wide() -> None:
    sync, ahead = windows_of(made_up_runs(), 4)
    assert sync.length_ns == ahead.length_ns == PERIODS * 6 * MS


def test_a_window_has_the_share_of_idle_time_that_the_run_has() -> None:
    for window in windows_of(made_up_runs(), 4):
        assert window.idle_ns / window.length_ns == pytest.approx(1 - window.whole.busy, abs=0.005)


def test_the_gaps_are_what_the_steps_leave_free() -> None:
    sync, _ = windows_of(made_up_runs(), 4)
    assert sum(end - start for start, end in sync.gaps()) == sync.idle_ns == pytest.approx(PERIODS * MS, rel=0.01)
    for start, end in sync.gaps():
        assert not any(step.start_ns < end and step.end_ns > start for step in sync.steps)


def test_the_enlarged_part_begins_in_a_step_and_holds_the_gap_after_it() -> None:
    for window in windows_of(made_up_runs(), 4):
        start, end = window.zoom_ns
        running = next(step for step in window.steps if step.start_ns < start < step.end_ns)
        following = next(step for step in window.steps if step.start_ns >= running.end_ns)
        assert following.start_ns < end
        assert window.start_ns <= start < end <= window.end_ns


def test_a_run_too_short_for_a_picture_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"the sync run has 6 steps .* raise --max-tokens"):
        windows_of(made_up_runs(steps=8), 4)


def test_png_and_svg_are_written_and_fit_a_readme(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    png, svg = draw_timeline(windows_of(made_up_runs(), 4), "a made-up run", tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size < 300_000
    assert "<svg" in svg.read_text()


def trace(model: str, out, *arguments: str) -> int:
    return cli.main([
        "trace", "--model", model, "--requests", "2", "--max-tokens", "40", "--out", str(out),
        "--device", "cpu", "--num-kv-blocks", "64", *arguments,
    ])  # fmt: skip


@pytest.fixture
def recorded(monkeypatch):
    """Stands for the engine. Returns: the settings of each run."""
    runs = []

    def record(model, settings, num_requests, max_tokens):
        runs.append(settings)
        mode = "async" if settings["async_scheduling"] else "sync"
        return made_up_profile(mode, max_tokens, rows=num_requests), "cpu"

    monkeypatch.setattr("stepahead.frontend.trace_command.record", record)
    return runs


def test_the_command_writes_trace_and_picture_of_a_real_run_in_both_modes(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    assert trace(write_hash_model(tmp_path / "model", step_ms=1), tmp_path / "out") == 0
    out, err = capsys.readouterr()
    written = [tmp_path / "out" / name for name in ("trace.json", "timeline.png", "timeline.svg")]
    assert [line.split()[0] for line in out.splitlines()] == list(map(str, written))
    assert all(path.stat().st_size for path in written)
    assert re.match(r"sync: [\d.]+ steps/s, device idle [\d.]+%\nasync: [\d.]+ steps/s, device idle [\d.]+%\n", err)


def test_a_model_without_a_tokenizer_is_traced_all_the_same(tmp_path, capsys, recorded) -> None:
    pytest.importorskip("matplotlib")
    assert trace(write_hash_model(tmp_path / "model", tokenizer=False), tmp_path / "out") == 0
    assert "has no tokenizer: its front end makes no text" in capsys.readouterr().err
    assert [(run["async_scheduling"], run["skip_tokenizer_init"]) for run in recorded] == [(False, True), (True, True)]


@pytest.mark.parametrize("disturbed", [False, True])
def test_runs_that_a_busy_machine_made_unlike_are_not_to_be_compared(tmp_path, capsys, monkeypatch, disturbed) -> None:
    def record(model, settings, num_requests, max_tokens):
        if settings["async_scheduling"]:
            return made_up_profile("async", max_tokens, step_ms=7.5 if disturbed else 5.0, rows=num_requests), "cpu"
        return made_up_profile("sync", max_tokens, rows=num_requests), "cpu"

    monkeypatch.setattr("stepahead.frontend.trace_command.record", record)
    monkeypatch.setattr("stepahead.frontend.trace_command.draw_timeline", lambda *args: [])
    assert trace(write_hash_model(tmp_path / "model", tokenizer=False), tmp_path / "out") == 0
    said = "the same steps took 5.0 and 7.5 ms on the device: something else kept this machine busy"
    assert (said in capsys.readouterr().err) == disturbed


def test_without_matplotlib_the_command_says_so_and_has_written_the_trace(
    tmp_path, capsys, monkeypatch, recorded
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert trace(write_hash_model(tmp_path / "model", tokenizer=False), tmp_path / "out") == 2
    assert "install stepahead with its extra `trace`" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("arguments", [["--requests", "0"], ["--max-tokens", "0"]])
def test_no_requests_or_tokens_are_refused(tmp_path, capsys, arguments) -> None:
    assert trace(str(tmp_path), tmp_path / "out", *arguments) == 2
    assert "must be at least 1" in capsys.readouterr().err
