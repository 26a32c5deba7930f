"""One command runs the engine and its workers, and leaves nothing behind, however it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

import stepahead
from external_workers import our_path
from failing_worker import VARIABLE
from launching import ASK, SCRIPT, answer_of_one_process, family_of, launch, workers_of
from process_tools import alive, nothing_left_behind, wait_until
from stepahead.errors import PeerLostError
from stepahead.worker.engine_link import LINK_LOST
from stepahead.worker.failure import failure
from stepahead.worker.heart import NO_SIGN_OF_ENGINE
from stepahead.worker.link_key import write_key_file
from stepahead.worker.process import ENGINE_HAS_FAILED
from tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(110)

ROOT = SCRIPT.parents[1]
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("model"), **THREE))


@pytest.fixture
def clean(model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STEPAHEAD_SYNC_CHECK", "off")
    monkeypatch.setenv("PYTHONPATH", our_path())
    with nothing_left_behind(monkeypatch):
        yield


def module_of(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OUTPUT = module_of(SCRIPT.with_name("torchrun_output.py"))


@pytest.mark.usefixtures("clean")
def test_ranks_answer_like_one_process_and_stdout_is_the_commands_alone(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Path(os.environ["TMPDIR"]) / "key"
    ask = [*ASK, "--max-tokens", "12", "--json"]
    monkeypatch.setenv("PET_NNODES", "2")  # meant for another torchrun
    launched = launch(model, "--tp", "3", "--", *ask, "--log-level", "info")
    output, errors = launched.communicate(timeout=90)
    assert launched.returncode == 0, errors
    assert "[rank 2] " in errors or "[rank 1] " in errors or "rank 2 has come" in errors
    answer, _ = (json.loads(line) for line in output.splitlines())
    assert answer == json.loads(answer_of_one_process(model, *ask).splitlines()[0])
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
        (["--pp", "2", "--nnodes", "2", "--head", "10.0.0.1:5"], "needs --key-file"),
        (["--pp", "2", "--nnodes", "2", "--node-rank", "1", "--head", "localhost:5", "--", "x"], "only node 0 takes"),
        (["--tp", "3"], "there is nothing to answer: give --prompt"),
        (["--tp", "3", "--head", "127.0.0.1:0"], "--head='127.0.0.1:0': must be HOST:PORT"),
        (["--tp", "3", "--", "--prompt", "a", "--executor", "mp"], "--executor mp: what follows the -- cannot differ"),
        (["--tp", "3", "--", "--prompt", "a", "--executor-address", "tcp://127.0.0.1:5"], "--executor-address tcp://"),
        (["--tp", "3", "--", "--prompt", "a", "--tensor-parallel-size", "1"], "--tensor-parallel-size 1: what"),
        (["--tp", "3", "--", "--prompt", "a", "--max-tokens", "0"], "max_tokens=0"),
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
    ("arguments", "message"),
    [
        (["--tp", "3", "--prompt", "a"], "unrecognized arguments: --prompt a (what goes to the engine follows a --)"),
        (["--tp", "3", "--", "--max-tokens", "x", "--prompt", "a"], "--max-tokens: invalid int value: 'x'"),
        (["--tp", "3", "--", "a prompt"], "invalid choice: 'a prompt'"),
    ],
)
def test_options_that_nobody_knows_are_refused_before_anything_starts(
    model: str, arguments: list[str], message: str
) -> None:
    launched = launch(model, *arguments)
    output, errors = launched.communicate(timeout=30)
    assert (launched.returncode, output) == (2, "")
    assert message in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("head", "bound"), [("10.0.0.1:5", "tcp://*:5"), ("node-0:77", "tcp://*:77"), ("[fd00::1]:5", "tcp://[::]:5")]
)
def test_the_engine_listens_on_every_network_and_workers_ask_for_the_name_they_were_given(
    model: str, tmp_path: Path, head: str, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_key_file(tmp_path / "key")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = module_of(SCRIPT)
    two = ["--pp", "2", "--device", "cpu", "--nnodes", "2", "--head", head, "--key-file", str(tmp_path / "key")]
    plan = script.make_plan(*script._parse(["--model", model, *two, "--", "--prompt", "a"]))
    assert f"--executor-address={bound}" in plan.engine
    assert plan.address == f"tcp://{head}"


def test_half_a_line_waits_for_the_rest_of_it_whatever_another_rank_says_meanwhile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = OUTPUT.RankLines(4)
    said = ["\x1e0\x1efirst half,\x1e1\x1e  indented\n", "W1130 torchrun\n", "\x1e0\x1e second\n", "\x1e1\x1elast"]
    assert [lines.take(piece) for piece in said] == ["", "W1130 torchrun\n", "", ""]
    died = "half a line, E1 api.py] failed (exitcode: -9) local_rank: 1 (pid: 7)\n"
    assert lines.take(f"\x1e0\x1e{died}") == died, "of a rank that was killed in the middle of a line"
    lines.end()
    assert capsys.readouterr().err.splitlines() == [
        "[rank 5]   indented", "[rank 4] first half, second", f"[rank 4] {died.rstrip()}", "[rank 5] last"
    ]  # fmt: skip


TORCHRUN = """E1129 23:31:36.912000 6450 api.py:1003] failed (exitcode: {}) local_rank: {} (pid: 6487) of binary: python
stepahead.worker FAILED
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 6488)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : {} (pid: 6487)
"""


@pytest.mark.parametrize(
    ("first", "codes", "raised", "bereft", "failure"),
    [
        (0, (1, 1), {0, 1}, {0}, (1, 1)),
        (0, (1, -9), {0}, {0}, (1, -9)),
        (0, (1, 1), {0, 1}, {0, 1}, (0, 1)),
        (0, (1, -15), {0}, {0}, (0, 1)),
        (0, (1, -15), {0, 1}, {0}, (1, 1)),
        (1, (-15, -9), set(), set(), (1, -9)),
        (1, (1, 7), {0}, {0}, (1, 7)),
    ],
)
def test_of_ranks_that_fail_at_once_the_one_that_misses_no_other_is_named(
    first: int, codes: tuple[int, int], raised: set[int], bereft: set[int], failure: tuple[int, int]
) -> None:
    """codes: of ranks 0 and 1."""
    said = TORCHRUN.format(codes[first], first, codes[1], codes[0])
    assert OUTPUT.first_failure(said, raised, bereft) == failure


@pytest.mark.usefixtures("clean")
def test_it_works_without_standard_output_and_where_the_temporary_folders_name_is_too_long_for_a_socket(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    errors = tmp_path / "errors"
    command = ["sh", "-c", 'exec "$@" >&- 2>"$0"', str(errors)]
    ask = [*ASK, "--max-tokens", "3", "--log-level", "info"]
    launched = [sys.executable, str(SCRIPT), "--model", model, "--device", "cpu", "--tp", "3", "--", *ask]
    assert subprocess.run([*command, *launched], timeout=60).returncode == 0, errors.read_text()
    assert "rank 2 has come" in errors.read_text()


@pytest.mark.parametrize(
    ("says", "is_bereft"),
    [
        (lambda: failure(0, PeerLostError("all_gather with other ranks failed")).message, True),
        (lambda: ENGINE_HAS_FAILED, True),
        (lambda: LINK_LOST, True),
        (lambda: NO_SIGN_OF_ENGINE % 10.0, True),
        (lambda: failure(0, ValueError("planted")).message, False),
    ],
)
def test_what_a_rank_says_that_misses_somebody_is_understood(says: Callable[[], str], is_bereft: bool) -> None:
    lines = OUTPUT.RankLines(0)
    lines.take(f"\x1e1\x1e2026-11-30 ERROR [worker 1 pid 7] stepahead: {says()}\n")
    assert lines.bereft == ({1} if is_bereft else set())


@pytest.mark.usefixtures("clean")
def test_a_killed_engine_is_named_and_no_rank(model: str) -> None:
    launched = launch(model, "--pp", "2", "--", *ASK, "--max-tokens", "240", "--ignore-eos")
    workers_of(launched, 2)
    (engine,) = [child for child in psutil.Process(launched.pid).children() if "generate" in child.cmdline()]
    assert launched.stdout is not None
    assert launched.stdout.read(1)
    engine.kill()
    _, errors = launched.communicate(timeout=60)
    assert launched.returncode == 128 + signal.SIGKILL, errors
    assert [line for line in errors.splitlines() if line.startswith("launch: ")] == [
        "launch: the engine was killed by SIGKILL"
    ]


@pytest.mark.usefixtures("clean")
def test_a_killed_rank_ends_all_with_its_exit_code(model: str) -> None:
    launched = launch(model, "--pp", "2", "--", *ASK, "--max-tokens", "240", "--ignore-eos", "--num-kv-blocks", "20")
    os.kill(workers_of(launched, 2)[1], signal.SIGKILL)
    _, errors = launched.communicate(timeout=60)
    assert launched.returncode == 128 + signal.SIGKILL, errors
    assert "was killed by SIGKILL" in errors


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(("where", "code", "sizes"), [
    ("raises", 1, ["--tp", "3"]), ("raises-loading", 1, ["--pp", "2"]), ("exits-7", 7, ["--pp", "2"]),
])  # fmt: skip
def test_a_rank_that_fails_is_named_with_its_traceback_and_gives_the_exit_code(
    model: str, where: str, code: int, sizes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"1:{where}")
    ask = [*ASK, "--max-tokens", "240", "--ignore-eos", "--json", "--executor", "failing_worker:FailingExternal"]
    launched = launch(model, *sizes, "--", *ask)
    ranks = workers_of(launched, int(sizes[1]))
    family = family_of(launched)
    output, errors = launched.communicate(timeout=90)
    assert launched.returncode == code, errors
    assert output == ""
    assert errors.count(f"launch: rank 1 exited with code {code}\n") == 1
    if where != "exits-7":
        told = [line.removeprefix("[rank 1] ") for line in errors.splitlines() if line.startswith("[rank 1] ")]
        assert any(line.endswith("Traceback (most recent call last):") for line in told)
        assert any(line.startswith('  File "') and "failing_worker.py" in line for line in told)
        assert any(line.startswith("ZeroDivisionError: planted") for line in told)
        assert "worker rank 1: ZeroDivisionError: planted" in errors
    assert all(line.startswith("[rank ") for line in errors.splitlines() if re.search(r"\[worker \d", line))
    assert not alive([*ranks, *family])


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
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_a_signal_ends_everything(model: str, sent: signal.Signals, code: int) -> None:
    launched = launch(model, "--pp", "2", "--", *ASK, "--max-tokens", "240", "--ignore-eos")
    workers_of(launched, 2)
    family = family_of(launched)
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
