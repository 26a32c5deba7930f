"""The benchmark of tokens per second prints one JSON document with what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import make_tiny_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_throughput.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("model"), tokenizer=True)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=110)


def test_it_measures_every_case_beside_a_peer(model: Path) -> None:
    done = run(
        model, "--batch", "1", "3", "--prompt-len", "8", "20", "--output-len", "6", "--repeats", "1",
        "--dtype", "float32", "--max-model-len", "64", "--peer", "transformers", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    document = json.loads(line)
    machine = document["machine"]
    assert machine["cores"] >= 1
    assert machine["torch_threads"] >= 1
    assert set(machine["engines"]) == {"stepahead", "transformers"}
    cases = [(result["prompt_len"], result["batch"], result["output_len"]) for result in document["results"]]
    assert cases == [(8, 1, 6), (8, 3, 6), (20, 1, 6), (20, 3, 6)]
    for result in document["results"]:
        assert result["tok_s"] > 0
        assert 0 < result["ttft_ms_p50"] <= result["ttft_ms_p99"]
        assert 0 < result["itl_ms_p50"] <= result["itl_ms_p99"]
        assert result["ratio"] == pytest.approx(result["cold_tok_s"] / result["peer_tok_s"], rel=0.01)
    memory = document["memory"]
    assert memory["all_peak_mb"] == pytest.approx(
        memory["front_end_peak_mb"] + memory["engine_core_peak_mb"] + memory["worker_0_peak_mb"], abs=0.2
    )
    assert document["start_to_first_token_s"] > 0


def test_what_does_not_fit_is_refused_before_anything_is_started(model: Path) -> None:
    done = run(model, "--prompt-len", "60", "--output-len", "6", "--max-model-len", "64")
    assert done.returncode == 2
    assert "longer than --max-model-len 64" in done.stderr
