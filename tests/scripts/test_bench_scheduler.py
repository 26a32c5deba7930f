"""The scheduler's benchmark, on few requests: what it says, not how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stepahead

pytestmark = pytest.mark.timeout(60)

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_scheduler.py"
TIMES = {"schedule_us", "update_us", "churn_schedule_us", "churn_update_us"}

PEER = f"""#!{sys.executable}
import json, sys
script, model, running = sys.argv[1:]
assert script.endswith("bench_scheduler_peer.py")
assert model == "a-model"
print("something that it logs")
print(json.dumps([{{"running": int(running), "schedule_us": 30000000.0, "update_us": 10000000.0}}]))
"""


def run(*options: str) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(Path(stepahead.__file__).parent.parent)}
    command = [sys.executable, str(SCRIPT), "--running", "1", "40", "--steps", "3", "--json", *options]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def test_it_measures_each_number_of_requests_and_the_front_end():
    document = run()
    assert [row.pop("running") for row in document["results"]] == [1, 40]
    for row in document["results"]:
        assert row.keys() == TIMES
        assert min(row.values()) > 0
    assert document["machine"]["cores"] == os.cpu_count()
    assert document["machine"]["torch_threads"] >= 1
    assert document["frontend"]["us_per_token"] > 0


def test_a_ratio_is_the_peers_time_over_ours(tmp_path: Path):
    peer = tmp_path / "python"
    peer.write_text(PEER)
    peer.chmod(0o700)
    for row in run("--peer-python", str(peer), "--peer-model", "a-model")["results"]:
        assert (row["peer_schedule_us"], row["peer_update_us"]) == (3e7, 1e7)
        assert row["ratio"] == round(4e7 / (row["schedule_us"] + row["update_us"]), 1)
