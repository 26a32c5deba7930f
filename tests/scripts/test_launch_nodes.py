"""The launch script on two nodes: here both are this machine, with the engine and rank 0 on the one, rank 1 on the
other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from external_workers import our_path
from launching import ASK, answer_of_one_process, family_of, launch, workers_of
from ports import port_below_the_ephemeral
from process_tools import alive, nothing_left_behind, wait_until
from stepahead.worker.link_key import write_key_file
from tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(110)

DEADLINE = 60
LONG = [*ASK, "--max-tokens", "240", "--ignore-eos"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """HashLM: a wrong token anywhere changes all later ones. A run of 240 tokens takes ten seconds."""
    return str(make_tiny_model("HashLM", tmp_path_factory.mktemp("model"), step_ms=40.0))


class Nodes:
    """Two launch scripts that are to meet. Each has its standard error in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = [folder / "key", folder / "other"]
        for file in self.keys:
            write_key_file(file)
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, model: str, sizes: list[str], command: list[str], keys: tuple[int, int] = (0, 0), path: str | None = None
    ) -> None:
        """keys: node 0's and node 1's. path: where node 1 looks for modules first."""
        head = f"127.0.0.1:{port_below_the_ephemeral()}"
        for node in (0, 1):
            place = [
                "--nnodes",
                "2",
                "--node-rank",
                str(node),
                "--head",
                head,
                "--key-file",
                str(self.keys[keys[node]]),
            ]
            with open(self._errors(node), "w") as errors:
                asked = [] if node else ["--", *command]
                searched = os.pathsep.join([path, our_path()]) if node and path else our_path()
                environment = {**os.environ, "PYTHONPATH": searched}
                self.processes.append(launch(model, *sizes, *place, *asked, stderr=errors, env=environment))

    def _errors(self, node: int) -> Path:
        return self.folder / f"errors of node {node}"

    def errors(self, node: int) -> str:
        return self._errors(node).read_text()

    def end(self) -> list[int]:
        """Waits for both. Returns: their exit codes."""
        return [process.wait(DEADLINE) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.communicate(timeout=DEADLINE)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("STEPAHEAD_SYNC_CHECK", "off")
    with nothing_left_behind(monkeypatch):
        pair = Nodes(tmp_path)
        try:
            yield pair
        finally:
            pair.close()


@pytest.mark.parametrize("sizes", [["--tp", "2"], ["--pp", "2"]])
def test_two_nodes_give_the_tokens_of_one_process(nodes: Nodes, sizes: list[str], tmp_path: Path) -> None:
    model = str(make_tiny_model("LlamaForCausalLM", tmp_path / "model"))
    ask = [*ASK, "--max-tokens", "12", "--json"]
    nodes.start(model, sizes, ask)
    outputs = [process.communicate(timeout=DEADLINE)[0] for process in nodes.processes]
    assert nodes.end() == [0, 0], nodes.errors(0) + nodes.errors(1)
    answer = json.loads(outputs[0].splitlines()[0])
    assert answer == json.loads(answer_of_one_process(model, *ask).splitlines()[0])
    assert len(answer["token_ids"]) == 12
    assert outputs[1] == ""


@pytest.mark.parametrize(
    ("killed", "sizes", "when"),
    [(1, ["--tp", "2"], "decodes"), (0, ["--pp", "2"], "decodes"), (0, ["--pp", "2"], "starts")],
)
def test_a_rank_killed_on_one_node_ends_both(
    nodes: Nodes, model: str, killed: int, sizes: list[str], when: str
) -> None:
    nodes.start(model, sizes, [*LONG, "--log-level", "info"])
    ranks = [workers_of(process, 1)[0] for process in nodes.processes]
    family = [pid for process in nodes.processes for pid in family_of(process)]
    wait_until(lambda: all(f"rank {rank} has come" in nodes.errors(0) for rank in (0, 1)), "both ranks come")
    if when == "decodes":
        assert nodes.processes[0].stdout is not None
        assert nodes.processes[0].stdout.read(1)
    os.kill(ranks[killed], signal.SIGKILL)
    codes = nodes.end()
    assert codes[killed] == 128 + signal.SIGKILL, nodes.errors(killed)
    assert codes[1 - killed] > 0, nodes.errors(1 - killed)
    assert f"launch: rank {killed} was killed by SIGKILL" in nodes.errors(killed)
    told = [line for line in nodes.errors(0).splitlines() if line.startswith("stepahead: error: ")]
    assert [f"worker rank {killed}: is gone (pid {ranks[killed]} on " in line for line in told] == [True]
    assert not alive(family)


def test_a_killed_torchrun_ends_both_nodes_with_an_error(nodes: Nodes, model: str) -> None:
    nodes.start(model, ["--tp", "2"], LONG)
    assert nodes.processes[0].stdout is not None
    assert nodes.processes[0].stdout.read(1)
    (torchrun,) = [
        child
        for child in psutil.Process(nodes.processes[0].pid).children()
        if "torch.distributed.run" in child.cmdline()
    ]
    torchrun.kill()
    codes = nodes.end()
    assert codes == [128 + signal.SIGKILL, 1], nodes.errors(0) + nodes.errors(1)
    assert "[torchrun] was killed by SIGKILL" in nodes.errors(0)
    assert "worker rank 0: is gone" in nodes.errors(0)


WORKER_BEGINS = """
import os, sys, time
if "stepahead.worker" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv:
    open(f"{folder}/begun", "w").close()
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.02)
    {end}
"""
"""sitecustomize.py, which python runs before anything else."""


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("os._exit(7)", 7, "exited with code 7"),
        ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL, "was killed by SIGKILL"),
        ("time.sleep(60)", 128 + signal.SIGTERM, "was stopped by SIGTERM"),
    ],
)
def test_a_rank_that_ends_before_it_greets_ends_the_other_node_too(
    nodes: Nodes, model: str, tmp_path: Path, end: str, code: int, how: str
) -> None:
    site = WORKER_BEGINS.replace("{folder}", str(tmp_path)).replace("{end}", end).replace('f"', '"')
    (tmp_path / "sitecustomize.py").write_text(site)
    nodes.start(model, ["--tp", "2"], [*LONG, "--log-level", "info"], path=str(tmp_path))
    wait_until((tmp_path / "begun").exists, "node 1's worker begins")
    wait_until(lambda: "waiting for 2 workers" in nodes.errors(0), "the engine listens")
    (tmp_path / "go").touch()
    if "sleep" in end:
        nodes.processes[1].terminate()
    codes = nodes.end()
    assert codes == [1, code], nodes.errors(0) + nodes.errors(1)
    (told,) = [line for line in nodes.errors(0).splitlines() if line.startswith("stepahead: error: ")]
    assert told.startswith(
        f"stepahead: error: the engine failed to start: worker rank 1: {how} on {socket.gethostname()}"
    )


def test_a_node_with_another_key_says_so_and_the_engine_waits_on(nodes: Nodes, model: str) -> None:
    nodes.start(model, ["--tp", "2"], LONG, keys=(0, 1))
    head, other = nodes.processes
    assert other.wait(DEADLINE) == 2, nodes.errors(1)
    (told,) = [line for line in nodes.errors(1).splitlines() if "key" in line]
    assert told.startswith("[rank 1] stepahead worker: error: tcp://127.0.0.1:")
    assert told.endswith("does not take our key: do both ends have the same key file, or none?")
    assert "Traceback" not in nodes.errors(1)
    wait_until(lambda: "link: refused" in nodes.errors(0), "a line of the engine's about it")
    assert head.poll() is None
    head.terminate()
    assert head.wait(DEADLINE) == 128 + signal.SIGTERM, nodes.errors(0)
    assert nodes.errors(0).count("link: refused") == 1


def test_a_head_port_in_use_is_refused_in_a_line(nodes: Nodes, model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        head = f"127.0.0.1:{taken.getsockname()[1]}"
        place = ["--nnodes", "2", "--head", head, "--key-file", str(nodes.keys[0])]
        node = launch(model, "--tp", "2", *place, "--", *LONG)
        _, errors = node.communicate(timeout=DEADLINE)
    assert node.returncode == 2, errors
    (told,) = errors.splitlines()
    port = head.rpartition(":")[2]
    assert told.startswith(
        f"stepahead: error: executor_address='tcp://*:{port}' cannot be bound: Address already in use"
    )
