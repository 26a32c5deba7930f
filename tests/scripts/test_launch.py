"""One command runs the engine and its workers, and leaves nothing behind, however it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import stepahead
from process_tools import alive, nothing_left_behind, wait_until
from stepahead.worker.link_key import write_key_file
from tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(110)

ROOT = Path(__file__).parents[2]
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 8}
ASK = ["--skip-tokenizer-init", "--prompt-token-ids", "5,6,7", "--temperature", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("model"), **THREE))


@pytest.fixture
def clean(model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STEPAHEAD_SYNC_CHECK", "off")
    monkeypatch.setenv("PYTHONPATH", str(Path(stepahead.__file__).parent.parent))
    with nothing_left_behind(monkeypatch):
        yield


def launch(model: str, *arguments: str, **popen: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--model", model, "--device", "cpu", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen)


def workers_of(process: subprocess.Popen[str], count: int) -> list[int]:
    def found() -> list[int]:
        children = psutil.Process(process.pid).children(recursive=True)
        return [
            c.pid for c in children if "stepahead.worker" in c.cmdline() and "torch.distributed.run" not in c.cmdline()
        ]

    deadline = time.monotonic() + 40
    while len(pids := found()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return pids


@pytest.mark.usefixtures("clean")
def test_ranks_answer_like_one_process_and_stdout_is_the_commands_alone(model: str) -> None:
    key = Path(os.environ["TMPDIR"]) / "key"
    ask = [*ASK, "--max-tokens", "12", "--json"]
    launched = launch(model, "--tp", "3", "--", *ask, "--log-level", "info")
    output, errors = launched.communicate(timeout=90)
    assert launched.returncode == 0, errors
    assert "[rank 2] " in errors or "[rank 1] " in errors or "rank 2 has come" in errors
    code = "import sys; from stepahead.frontend.cli import main; sys.exit(main())"
    alone = [sys.executable, "-c", code, "generate", "--model", model, "--device", "cpu", "--executor", "uni", *ask]
    expected = subprocess.run(alone, check=True, capture_output=True, text=True, cwd="/tmp").stdout
    answer, _ = (json.loads(line) for line in output.splitlines())
    assert answer == json.loads(expected.splitlines()[0])
    assert not key.exists()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "2"], "3 KV heads cannot be divided among tensor_parallel_size=2"),
        (
            ["--tp", "3", "--nnodes", "2", "--head", "127.0.0.1:5"],
            "3 ranks cannot be divided among --nnodes 2 machines",
        ),
        (["--pp", "2", "--nnodes", "2"], "needs --head HOST:PORT"),
        (["--pp", "2", "--nnodes", "2", "--head", "10.0.0.1:5"], "needs a key_file"),
        (["--pp", "2", "--nnodes", "2", "--node-rank", "1", "--head", "localhost:5", "--", "x"], "only node 0 takes"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line_and_nothing_started(
    model: str, arguments: list[str], message: str
) -> None:
    launched = launch(model, *arguments)
    output, errors = launched.communicate(timeout=30)
    assert launched.returncode == 2
    assert message in errors
    assert errors.count("\n") == 1
    assert output == ""


@pytest.mark.parametrize(
    ("head", "bound"), [("10.0.0.1:5", "tcp://*:5"), ("node-0:77", "tcp://*:77"), ("[fd00::1]:5", "tcp://[::]:5")]
)
def test_the_engine_listens_on_every_network_and_workers_ask_for_the_name_they_were_given(
    model: str, tmp_path: Path, head: str, bound: str
) -> None:
    write_key_file(tmp_path / "key")
    spec = importlib.util.spec_from_file_location("launch_script", ROOT / "scripts" / "launch.py")
    assert spec is not None
    assert spec.loader is not None
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    two = ["--pp", "2", "--device", "cpu", "--nnodes", "2", "--head", head, "--key-file", str(tmp_path / "key")]
    plan = script.make_plan(*script._parse(["--model", model, *two]))
    assert f"--executor-address={bound}" in plan.engine
    assert plan.address == f"tcp://{head}"


@pytest.mark.usefixtures("clean")
def test_a_killed_rank_ends_all_with_its_exit_code(model: str) -> None:
    launched = launch(model, "--pp", "2", "--", *ASK, "--max-tokens", "240", "--ignore-eos", "--num-kv-blocks", "20")
    os.kill(workers_of(launched, 2)[1], signal.SIGKILL)
    _, errors = launched.communicate(timeout=60)
    assert launched.returncode == 128 + signal.SIGKILL, errors
    assert "was killed by SIGKILL" in errors


@pytest.mark.usefixtures("clean")
def test_no_rank_outlives_a_killed_torchrun_where_no_engine_is(model: str) -> None:
    key = str(Path(os.environ["TMPDIR"]) / "key")
    write_key_file(key)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # an engine that never answers: the ranks wait for it
        head = f"127.0.0.1:{nobody.getsockname()[1]}"
        two = ["--nnodes", "2", "--node-rank", "1", "--head", head, "--key-file", key]
        launched = launch(model, "--tp", "3", "--pp", "2", *two)
        ranks = workers_of(launched, 3)
        os.kill(psutil.Process(ranks[0]).ppid(), signal.SIGKILL)
        launched.communicate(timeout=60)
    assert launched.returncode == 128 + signal.SIGKILL
    assert not alive(ranks)
    os.unlink(key)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_ends_everything(model: str, sent: signal.Signals, code: int) -> None:
    launched = launch(model, "--pp", "2", "--", *ASK, "--max-tokens", "240", "--ignore-eos")
    workers_of(launched, 2)
    family = [child.pid for child in psutil.Process(launched.pid).children(recursive=True)]
    os.kill(launched.pid, sent)
    assert launched.wait(40) == code
    wait_until(lambda: not alive(family), "all that it started gone")
    launched.communicate()


def test_torchruns_own_ranks_pass_the_tests_for_them() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(stepahead.__file__).parent.parent)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", str(ROOT / "tests" / "distributed")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
