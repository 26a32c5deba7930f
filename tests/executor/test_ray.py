"""Workers that a real local Ray starts: the tokens of one process, a clear account of an end, nothing left."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stepahead
from oracle import token_ids
from paper_device import generate_alone, paper_config
from plans import PROMPT
from ports import port_below_the_ephemeral
from process_tools import nothing_left_behind, wait_until
from stepahead import LLM, SamplingParams
from stepahead.errors import ConfigError
from stepahead.executor.ray_executor import RayExecutor
from tiny_models import VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.timeout(200)


@contextlib.contextmanager
def ray_of_our_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("ray", reason="needs stepahead's extra `ray`")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("STEPAHEAD_SYNC_CHECK", "off")  # under it torch makes a cache folder of its own
    with nothing_left_behind(monkeypatch), tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as logs:
        monkeypatch.setenv("RAY_TMPDIR", logs)  # a folder of Ray's own, for its logs: it stays
        yield


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    rng = random.Random(3)
    prompts = [[rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in (1, 16, 33)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=10, ignore_eos=True) for i in range(3)]
    with LLM(str(folder), device="cpu", skip_tokenizer_init=True, max_num_batched_tokens=32, **settings) as llm:
        assert llm.async_scheduling
        return [token_ids(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def test_ranks_that_ray_starts_give_the_tokens_of_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path)
    alone = tokens(folder, executor="uni")
    with ray_of_our_own(monkeypatch):
        assert tokens(folder, executor="ray", tensor_parallel_size=2) == alone


@contextlib.contextmanager
def a_cluster(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Ray as others have started it, with two CPUs; it asks for a token."""
    ports = ["--port", str(port), "--min-worker-port", "0", "--max-worker-port", "0"]  # else it reserves thousands
    options = [*ports, "--node-ip-address", "127.0.0.1", "--num-cpus", "2", "--include-dashboard", "false"]
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "start", "--head", "--block", "--object-store-memory", str(80 << 20), *options]
    with open(log, "wb") as said:
        cluster = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text() or cluster.poll() is not None, "Ray starts", 60)
        assert cluster.poll() is None, log.read_text()
        yield cluster
    finally:
        cluster.terminate()
        cluster.wait(60)


def test_ranks_in_a_cluster_that_was_there_give_the_tokens_of_one_process_and_leave_it_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path)
    alone = tokens(folder, executor="uni")
    port = port_below_the_ephemeral()
    with ray_of_our_own(monkeypatch):
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        with a_cluster(port, tmp_path / "log") as cluster:
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
            assert tokens(folder, executor="ray", pipeline_parallel_size=2) == alone
            assert cluster.poll() is None


def test_a_cluster_that_does_not_answer_is_an_error_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs stepahead's extra `ray`")
    address = f"127.0.0.1:{port_below_the_ephemeral()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS={address}: nobody answers there .Connection refused"):
        RayExecutor(paper_config(executor="ray"))


PAPER_ENGINE = """
import os, signal, sys, time
from paper_device import paper_config
from plans import plan
from stepahead.errors import WorkerError
from stepahead.executor.ray_executor import RayExecutor

handler = signal.getsignal(signal.SIGTERM)
executor = RayExecutor(paper_config(executor="ray", tensor_parallel_size=2, device="cpu"), "paper_worker:PaperWorker")
assert signal.getsignal(signal.SIGTERM) is handler
assert executor.collective_rpc(lambda worker: worker.rank) == [0, 1]
assert "torch" not in sys.modules
first, second = executor.worker_infos()
executor.initialize_cache(first.kv_blocks, 512)
for step_id in range(3):
    executor.execute_model(plan(step_id)).result()
    print(executor.sample_tokens(None).result().sampled[0, 0], file=sys.stderr)
os.kill(second.pid, signal.SIGKILL)
end = time.monotonic() + 10
try:
    while time.monotonic() < end:
        executor.check_health()
except WorkerError as error:
    print(error, file=sys.stderr)
executor.shutdown()
executor.shutdown()
"""


def test_a_killed_worker_of_rays_is_named_and_the_engine_process_has_no_torch_and_a_clean_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = os.pathsep.join([str(Path(stepahead.__file__).parent.parent), str(Path(__file__).parents[1] / "helpers")])
    with ray_of_our_own(monkeypatch):
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-c", PAPER_ENGINE]
        engine = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert engine.returncode == 0, engine.stderr
    assert engine.stdout == ""
    for token in generate_alone(PROMPT, 3, (), 512):
        assert f"{token}\n" in engine.stderr
    assert "worker rank 1: was killed by SIGKILL" in engine.stderr


def test_without_ray_the_executor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"executor 'ray' needs Ray: install stepahead with its extra `ray`"):
        RayExecutor(paper_config(executor="ray"))
