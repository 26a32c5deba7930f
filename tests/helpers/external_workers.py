"""Workers of an engine that starts none itself: processes of `python -m stepahead.worker`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import stepahead
from process_tools import DEADLINE

_OTHER_RANKS = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_LOCALID")
"""What the tests' own launcher may have said."""


def our_path() -> str:
    """PYTHONPATH of a process that is to know stepahead and these helpers."""
    return os.pathsep.join([str(Path(stepahead.__file__).parent.parent), str(Path(__file__).parent)])


def start_worker(
    address: str, *options: str, key_file: Path | None = None, **environment: str
) -> subprocess.Popen[str]:
    """What it says on standard error is to be read with communicate()."""
    command = [sys.executable, "-m", "stepahead.worker", "--connect", address, *options]
    if key_file is not None:
        command += ["--key-file", str(key_file)]
    inherited = {name: value for name, value in os.environ.items() if name not in _OTHER_RANKS}
    return subprocess.Popen(
        command, env={**inherited, "PYTHONPATH": our_path(), "OMP_NUM_THREADS": "1", **environment}, cwd="/tmp",
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@contextlib.contextmanager
def workers(address: str, count: int, codes: Sequence[int] = (0,)) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks 0 to count - 1, on one machine. After the block all of them must end, each with one of `codes`."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(count):
            place = ["--rank", str(rank), "--local-rank", str(rank), "--local-size", str(count)]
            processes.append(start_worker(address, *place))
        yield processes
        for process in processes:
            _, errors = process.communicate(timeout=DEADLINE)
            assert process.returncode in codes, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
