"""The launch script on two nodes: here both are this machine, with the engine and rank 0 on the one, rank 1 on the
other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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


@dataclass
class Nodes:
    """Two launch scripts that are to meet."""

    head: subprocess.Popen[str]
    other: subprocess.Popen[str]

    def end(self) -> list[str]:
        """Waits for both. Returns: what they wrote to standard error."""
        return [node.communicate(timeout=DEADLINE)[1] for node in (self.head, self.other)]

    @property
    def codes(self) -> list[int]:
        return [self.head.returncode, self.other.returncode]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("model")))


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Two different ones."""
    monkeypatch.setenv("STEPAHEAD_SYNC_CHECK", "off")
    monkeypatch.setenv("PYTHONPATH", our_path())
    files = tmp_path / "key", tmp_path / "other"
    for file in files:
        write_key_file(file)
    with nothing_left_behind(monkeypatch):
        yield files


def start(model: str, sizes: list[str], keys: tuple[Path, Path], command: list[str]) -> Nodes:
    """keys: node 0's and node 1's."""
    common = [*sizes, "--nnodes", "2", "--head", f"127.0.0.1:{port_below_the_ephemeral()}"]
    nodes = [[*common, "--key-file", str(key), "--node-rank", str(number)] for number, key in enumerate(keys)]
    other = launch(model, *nodes[1])  # it may well be there before the engine is
    return Nodes(launch(model, *nodes[0], "--", *command), other)


def test_two_nodes_give_the_tokens_of_one_process(model: str, keys: tuple[Path, Path]) -> None:
    ask = [*ASK, "--max-tokens", "12", "--json"]
    nodes = start(model, ["--tp", "2"], (keys[0], keys[0]), ask)
    output, errors = nodes.head.communicate(timeout=DEADLINE)
    others = nodes.other.communicate(timeout=DEADLINE)
    assert nodes.codes == [0, 0], errors + others[1]
    assert output.splitlines()[0] == answer_of_one_process(model, *ask).splitlines()[0]
    assert json.loads(output.splitlines()[0])["token_ids"]
    assert others[0] == ""


@pytest.mark.parametrize(("killed", "sizes"), [(1, ["--tp", "2"]), (0, ["--tp", "2"]), (0, ["--pp", "2"])])
def test_a_rank_killed_on_one_node_ends_both(
    model: str, keys: tuple[Path, Path], killed: int, sizes: list[str]
) -> None:
    nodes = start(model, sizes, (keys[0], keys[0]), [*LONG, "--log-level", "info"])
    ranks = [workers_of(node, 1)[0] for node in (nodes.head, nodes.other)]
    family = [*family_of(nodes.head), *family_of(nodes.other)]
    os.kill(ranks[killed], signal.SIGKILL)
    errors = nodes.end()
    assert nodes.codes[killed] == 128 + signal.SIGKILL, errors[killed]
    assert f"launch: rank {killed} was killed by SIGKILL" in errors[killed]
    assert nodes.codes[1 - killed] > 0, errors[1 - killed]
    assert f"stepahead: error: the engine died: worker rank {killed}: is gone (pid {ranks[killed]} on" in errors[0]
    wait_until(lambda: not alive(family), "all that they started gone")


def test_a_node_with_another_key_says_so_and_the_engine_waits_on(model: str, keys: tuple[Path, Path]) -> None:
    nodes = start(model, ["--tp", "2"], keys, LONG)
    _, errors = nodes.other.communicate(timeout=DEADLINE)
    assert nodes.other.returncode == 2, errors
    (told,) = [line for line in errors.splitlines() if "key" in line]
    assert told.startswith("[rank 1] stepahead worker: error: tcp://127.0.0.1:")
    assert told.endswith("does not take our key: do both ends have the same key file, or none?")
    assert "Traceback" not in errors
    assert nodes.head.poll() is None
    nodes.head.terminate()
    _, errors = nodes.head.communicate(timeout=DEADLINE)
    assert nodes.head.returncode == 128 + signal.SIGTERM, errors
    assert errors.count("link: refused") == 1


def test_a_head_port_in_use_is_refused_in_a_line(model: str, keys: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        head = f"127.0.0.1:{taken.getsockname()[1]}"
        node = launch(model, "--tp", "2", "--nnodes", "2", "--head", head, "--key-file", str(keys[0]), "--", *LONG)
        _, errors = node.communicate(timeout=DEADLINE)
    assert node.returncode == 2, errors
    assert errors.splitlines() == [
        f"stepahead: error: executor_address='tcp://*:{head.rpartition(':')[2]}' cannot be bound: "
        "Address already in use"
    ]
