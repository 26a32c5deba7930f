"""A worker that somebody else than the engine starts: `python -m stepahead.worker --connect ADDRESS`.

Who it is among the workers is said by options, or by what torchrun or SLURM put into the environment.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence

from ..errors import ConfigError, StepaheadError
from . import standard_streams
from .addresses import check_engine
from .child_process import for_large_tensors
from .handshake import JOIN_TIMEOUT_S, Listener, Place
from .link_key import read_key_file
from .process import run_worker

_USER_ERROR = 2

_LAUNCHERS = (
    ("torchrun", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ""),
    ("SLURM", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
)
"""Variables of the rank, the rank on this machine, and how many ranks it has; SLURM lists that for all machines, so
one more says which of them this is."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 when the engine has ended this worker, 1 when it failed, 2 for an error of the user's."""
    arguments = _parse(argv)
    standard_streams.open_missing()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once: the engine sees it
    try:
        key = None if arguments.key_file is None else read_key_file(arguments.key_file)
        check_engine(arguments.connect, key is not None)
        place = find_place(arguments, os.environ)
        listener = Listener(arguments.connect) if place.rank == 0 else None
        return run_worker(arguments.connect, place, key, listener, arguments.join_timeout)
    except StepaheadError as error:
        print(f"stepahead worker: error: {error}", file=sys.stderr)
        return _USER_ERROR


def find_place(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Place:
    """Raises: ConfigError when nobody says which rank this is."""
    rank, local_rank, local_size = arguments.rank, arguments.local_rank, arguments.local_size
    for _, rank_name, near_name, size_name, node_name in _LAUNCHERS:
        if rank_name in environment and rank is None:
            rank, near = (_number(name, environment.get(name)) for name in (rank_name, near_name))
            size = _size_here(size_name, node_name, environment)
            local_rank = near if local_rank is None else local_rank
            local_size = size if local_size is None else local_size
            if arguments.first_rank is not None and near is not None:
                rank = arguments.first_rank + near
    if rank is None:
        names = " or ".join(f"{variables[0]} ({launcher})" for launcher, *variables in _LAUNCHERS)
        raise ConfigError(f"which rank is this worker? Give --rank, or start it so that {names} is set")
    local_rank = local_rank or 0
    local_size = local_rank + 1 if local_size is None else local_size
    if min(rank, local_rank) < 0 or local_rank >= local_size:
        raise ConfigError(f"rank {rank}, local rank {local_rank} of {local_size}: must be 0 or more and below it")
    return Place(rank, local_rank, local_size, arguments.launch)


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(f"{name}={text!r}: must be a number")
    return int(text)


def _size_here(name: str, node_name: str, environment: Mapping[str, str]) -> int | None:
    """How many ranks this machine has: "4", or of a list for all machines, "4(x2),3" for [4, 4, 3], its own."""
    text = environment.get(name)
    if text is None:
        return None
    node = _number(node_name, environment.get(node_name)) or 0
    first = 0
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part)
        if match is None:
            raise ConfigError(f"{name}={text!r}: must be a number, or a list like 4(x2),3")
        first += int(match.group(2) or 1)
        if node < first:
            return int(match.group(1))
    raise ConfigError(f"{name}={text!r} says nothing of this machine, {node_name}={node}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stepahead.worker",
        description="A worker of an engine that runs with --executor external. Its rank comes from the options, or "
        "from the variables of torchrun or SLURM.",
    )
    parser.add_argument("--connect", required=True, metavar="ADDRESS", help="the engine's executor_address")
    parser.add_argument("--key-file", metavar="FILE", help="the engine's key_file")
    parser.add_argument("--rank", type=int, metavar="INT", help="stage * tensor_parallel_size + rank within the stage")
    parser.add_argument("--local-rank", type=int, metavar="INT", help="which of this machine's GPUs; default: 0")
    parser.add_argument(
        "--local-size", type=int, metavar="INT", help="workers of this machine; default: local rank + 1"
    )
    parser.add_argument(
        "--first-rank", type=int, metavar="INT",
        help="when each machine has a torchrun of its own: the rank of this machine's first worker",
    )  # fmt: skip
    parser.add_argument(
        "--join-timeout", type=float, default=JOIN_TIMEOUT_S, metavar="SECONDS",
        help=f"in which an engine must have answered; default: {JOIN_TIMEOUT_S:g}",
    )  # fmt: skip
    parser.add_argument("--launch", metavar="NAME", help="of whoever starts this worker, to report its end by")
    return parser.parse_args(argv)


def _prepare_memory() -> None:
    """glibc reads its environment only when a process begins."""
    environment = for_large_tensors(os.environ)
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


if __name__ == "__main__":
    _prepare_memory()
    sys.exit(main())
