"""The benchmark of the overlap prints one JSON document with what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_overlap.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=100)


def test_it_measures_ranks_that_work_together() -> None:
    done = run("--step-ms", "1", "--requests", "2", "--steps", "16", "--rounds", "1", "--tp", "2", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [(r["tp"], r["mode"]) for r in results] == [(2, "sync"), (2, "async")]


def test_it_measures_both_modes_in_turn() -> None:
    done = run("--step-ms", "1", "--requests", "3", "--steps", "20", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    document = json.loads(line)
    assert document["machine"]["cores"] >= 1
    results = document["results"]
    assert [(r["requests"], r["mode"]) for r in results] == [(3, "sync"), (3, "async")]
    for result in results:
        assert result["step_ms"] == 1
        assert 0 < result["busy"] <= 1
        assert result["device_step_ms"] >= 1
        assert 0 < result["steps_per_s"] < 1000
        assert result["gap_us_p99"] >= result["gap_us_mean"] / 100
        assert 10 <= result["steps"] <= 20
