"""Which rank a worker is: options, torchrun's variables, SLURM's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stepahead
from stepahead.errors import ConfigError
from stepahead.worker.__main__ import _parse, find_place
from stepahead.worker.addresses import check_engine
from stepahead.worker.handshake import Listener, Place
from stepahead.worker.sockets import beside

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}


@pytest.mark.parametrize(
    ("options", "environment", "place"),
    [
        (["--rank", "3"], {}, Place(3, 0, 1)),
        (["--rank", "3", "--local-rank", "1", "--local-size", "2"], TORCHRUN, Place(3, 1, 2)),
        ([], TORCHRUN, Place(5, 1, 4)),
        ([], SLURM, Place(9, 1, 8)),
        ([], {**SLURM, **TORCHRUN}, Place(5, 1, 4)),
        ([], {**SLURM, **TORCHRUN, "SLURM_NODEID": "1"}, Place(5, 1, 4)),
        ([], {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, Place(9, 1, 4)),
        ([], {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, Place(9, 1, 3)),
        ([], {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,2", "SLURM_NODEID": "1"}, Place(9, 1, 2)),
        (["--first-rank", "8"], TORCHRUN, Place(9, 1, 4)),
        (["--local-rank", "0"], TORCHRUN, Place(5, 0, 4)),
    ],
)
def test_options_come_before_torchruns_variables_and_those_before_slurms(
    options: list[str], environment: dict[str, str], place: Place
) -> None:
    assert find_place(_parse(["--connect", "tcp://h:1", *options]), environment) == place


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ([], {}, r"which rank is this worker\? Give --rank, or start it so that RANK \(torchrun\)"),
        ([], {**TORCHRUN, "RANK": "one"}, "RANK='one': must be a number"),
        ([], {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2"}, r"='4\(x2': must be a number, or a list like 4\(x2\),3"),
        ([], {**SLURM, "SLURM_NODEID": "2"}, r"='8\(x2\)' says nothing of this machine, SLURM_NODEID=2"),
        (["--rank", "-1"], {}, "must be 0 or more"),
        (["--rank", "0", "--local-rank", "2", "--local-size", "2"], {}, "local rank 2 of 2"),
    ],
)
def test_a_worker_that_cannot_be_placed_says_why(options: list[str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_place(_parse(["--connect", "tcp://h:1", *options]), environment)


def test_errors_of_the_users_are_one_line_and_status_2(tmp_path: Path) -> None:
    path = str(Path(stepahead.__file__).parent.parent)
    command = [sys.executable, "-m", "stepahead.worker", "--connect", "tcp://h:1", "--key-file", str(tmp_path / "key")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert done.stderr.startswith("stepahead worker: error: key_file=")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://10.0.0.1:7777", "an engine on another machine must prove itself: give its key file with --key-file"),
        ("tcp://head:7777", "an engine on another machine must prove itself"),
        ("ipc://{open}/plans", "the folder .* must be yours alone: chmod 700 it"),
        ("ipc://{open}/none/plans", "none: No such file or directory"),
        ("head:7777", "must be tcp://HOST:PORT or ipc://FILE"),
    ],
)
def test_a_worker_does_not_ask_whom_it_cannot_trust_what_to_run(address: str, message: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=message):
        check_engine(address.format(open=tmp_path), has_key=False)


def test_a_worker_trusts_a_key_its_own_machine_and_its_users_own_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    check_engine("tcp://10.0.0.1:7777", has_key=True)
    for address in ("tcp://127.0.0.1:7777", "tcp://localhost:1", "tcp://[::1]:1", f"ipc://{tmp_path}/plans"):
        check_engine(address, has_key=False)


def test_rank_0_listens_where_it_reaches_the_engine_before_it_says_so() -> None:
    listener = Listener("tcp://127.0.0.1:7777")
    assert listener.address.startswith("tcp://127.0.0.1:")
    assert not listener.address.endswith(":0")
    os.close(listener.detach())


@pytest.mark.parametrize(
    ("told", "known", "seen"),
    [
        ("tcp://0.0.0.0:41", "tcp://head:7", "tcp://head:41"),
        ("tcp://[::]:41", "tcp://[fe80::1]:7", "tcp://[fe80::1]:41"),
        ("ipc:///tmp/x/replies", "ipc:///tmp/x/plans", "ipc:///tmp/x/replies"),
    ],
)
def test_a_second_address_is_at_the_host_where_the_first_was_reached(told: str, known: str, seen: str) -> None:
    assert beside(told, known) == seen
