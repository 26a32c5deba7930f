#!/usr/bin/env python3
"""Runs a model over many GPUs, or many ranks on a CPU: the engine, and this machine's workers through torchrun.

    scripts/launch.py --model M --tp 8 -- --prompt "The sea is"
    scripts/launch.py --model M --tp 3 --device cpu -- --prompt "The sea is" --max-tokens 32 --json

What follows `--` goes to `stepahead generate` (or to the command that it begins with); stdout is that command's. Two
machines, one command on each; only node 0 takes what follows `--`:

    stepahead keygen key      # once; copy it to the other machine
    scripts/launch.py --model M --tp 8 --pp 2 --nnodes 2 --node-rank 0 --head 10.0.0.1:7777 --key-file key -- --prompt …
    scripts/launch.py --model M --tp 8 --pp 2 --nnodes 2 --node-rank 1 --head 10.0.0.1:7777 --key-file key

The exit status: the engine's, or that of the rank that failed first; 2 for what is refused before anything starts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrun_output import MARK, RankFailure, RankLines, first_failure, how_it_ended

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"

_REFUSED = 2
_LEAVE_SECONDS = 7.0
"""What workers get to end by themselves when the engine has ended: a little more than they give themselves."""

_STOP_SECONDS = 3.0
"""The same after a signal, and for an engine whose workers have ended, which it sees at once."""

_TERM_SECONDS = 8.0
"""Between SIGTERM and SIGKILL."""

_SOCKET_NAME_BYTES = 50
"""The private folder's own name, and the longest of a file in it."""

_ENGINE = "import sys; sys.path[:] = filter(None, sys.path); from stepahead.frontend.cli import main; sys.exit(main())"
_TORCHRUN_OPTIONS = "PET_"
"""What it takes from the environment may be meant for another one."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(argv: Sequence[str] | None = None) -> int:
    arguments, command = _parse(sys.argv[1:] if argv is None else argv)
    from stepahead.errors import StepaheadError
    from stepahead.worker import standard_streams

    standard_streams.open_missing()
    try:
        plan = make_plan(arguments, command)
    except StepaheadError as error:
        print(f"launch: error: {error}", file=sys.stderr)
        return _REFUSED
    with PrivateFolder() as folder:
        return Launch(plan, folder).run()


@dataclass(frozen=True)
class LaunchPlan:
    """engine: the command line of `stepahead`, None on nodes other than 0. address: where workers connect, None for a
    socket in the private folder. first_rank, local_size: this machine's ranks."""

    engine: list[str] | None
    address: str | None
    key_file: str | None
    first_rank: int
    local_size: int


def make_plan(arguments: argparse.Namespace, command: list[str]) -> LaunchPlan:
    """Raises: ConfigError when the model, the machine and the wishes do not go together; InvalidRequestError and
    SystemExit when the engine would not take its command line."""
    from stepahead.config import check_division, parse_settings
    from stepahead.errors import ConfigError
    from stepahead.frontend import cli
    from stepahead.frontend.hub import resolve_folder
    from stepahead.worker.model_config import read_model_config

    world_size = arguments.tp * arguments.pp
    if min(arguments.tp, arguments.pp, arguments.nnodes) < 1 or not 0 <= arguments.node_rank < arguments.nnodes:
        raise ConfigError("--tp, --pp and --nnodes must be 1 or more, and --node-rank from 0 to below --nnodes")
    if world_size % arguments.nnodes:
        raise ConfigError(f"{world_size} ranks cannot be divided among --nnodes {arguments.nnodes} machines")
    what = "HOST:PORT, node 0 as the others reach it and a free port there"
    if arguments.nnodes > 1 and arguments.head is None:
        raise ConfigError(f"--nnodes above 1 needs --head {what}")
    if arguments.head is not None and not re.fullmatch(r".+:[1-9]\d*", arguments.head):
        raise ConfigError(f"--head={arguments.head!r}: must be {what}")
    if command and arguments.node_rank:
        raise ConfigError(f"{command[0]!r} ...: only node 0 takes what follows `--`")
    if arguments.nnodes > 1 and not arguments.key_file:
        raise ConfigError("--nnodes above 1 needs --key-file, the same on all: `stepahead keygen FILE` makes one")
    model = os.path.abspath(resolve_folder(arguments.model, None))
    check_division(read_model_config(model), arguments.tp, arguments.pp)
    local_size = world_size // arguments.nnodes
    settings: dict[str, Any] = {
        "executor": "external",
        "device": _device(arguments.device, local_size),
        "tensor_parallel_size": arguments.tp,
        "pipeline_parallel_size": arguments.pp,
    }
    address = f"tcp://{arguments.head}" if arguments.head else None
    if address is not None:
        settings["executor_address"] = address if arguments.nnodes == 1 else _everywhere(arguments.head)
    key_file = os.path.abspath(arguments.key_file) if arguments.key_file else None
    if key_file is not None:
        settings["key_file"] = key_file
    parse_settings(model, settings)
    engine = None
    if arguments.node_rank == 0:
        name, rest = (command[0], command[1:]) if command and command[0][:1] != "-" else ("generate", command)
        options = [f"--{setting.replace('_', '-')}={value}" for setting, value in settings.items()]
        engine = [name, "--model", model, *options, *rest]
        _check_same(cli.check(engine), settings)
    return LaunchPlan(engine, address, key_file, arguments.node_rank * local_size, local_size)


def _check_same(arguments: argparse.Namespace, settings: dict[str, Any]) -> None:
    """arguments: the engine's. Raises: ConfigError when what follows `--` says otherwise than the workers are told."""
    from stepahead.config import EXECUTORS
    from stepahead.errors import ConfigError

    for name, value in settings.items():
        given = getattr(arguments, name)
        is_executor_class = name == "executor" and given not in EXECUTORS
        if given != value and not is_executor_class:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {given}: after the -- it cannot be other than what comes before, {value!r}")


def _everywhere(head: str) -> str:
    """Where the engine listens: the name by which others reach node 0 may mean something else there, or be no address
    of its own at all."""
    return f"tcp://{'[::]' if head.startswith('[') else '*'}:{head.rpartition(':')[2]}"


def _device(asked: str, local_size: int) -> str:
    """Raises: ConfigError when there are fewer GPUs than this machine's ranks."""
    from stepahead.errors import ConfigError

    if asked == "cpu":
        return asked
    import torch

    gpus = torch.cuda.device_count()
    if gpus < local_size and (gpus or asked == "cuda"):
        raise ConfigError(f"{local_size} ranks on this machine, and {gpus} GPUs: take fewer, or --device cpu")
    return "cuda" if gpus else "cpu"


class PrivateFolder:
    """A folder for sockets and logs that goes when this process ends, however it ends."""

    def __enter__(self) -> str:
        from stepahead.worker.sockets import folder_for_sockets

        self.path = tempfile.mkdtemp(
            prefix="stepahead-launch-", dir=folder_for_sockets(tempfile.gettempdir(), _SOCKET_NAME_BYTES)
        )
        script = 'trap "" INT TERM HUP; cat >/dev/null; rm -rf -- "$1"'
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", self.path], stdin=subprocess.PIPE, start_new_session=True
        )
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._guard.communicate()


class Launch:
    """The processes of this machine, from their start to the last one's end."""

    def __init__(self, plan: LaunchPlan, folder: str) -> None:
        self._plan = plan
        self._folder = folder
        self._address = plan.address or f"ipc://{folder}/plans"
        self._engine: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []
        self._failure: RankFailure | None = None
        self._is_news = True
        self._first_code = 0
        self._ends_them = False

    def run(self) -> int:
        import psutil

        _adopt_orphans()
        guard = {child.pid for child in psutil.Process().children()}  # of the private folder
        for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(caught, lambda number, _: self._signals.append(number))
        workers = self._start_workers()
        reader = threading.Thread(target=self._show, args=(workers,), name="worker-output", daemon=True)
        reader.start()
        try:
            if self._plan.engine is not None:
                self._engine = self._start_engine(self._plan.engine)
            self._until_one_ends(self._processes(workers))
            self._first_code = next((code for p in self._processes(workers) if (code := p.poll())), 0)
            if workers.poll() is not None:  # if it was killed, its ranks are still there, and the engine goes on
                _kill_children(besides={*guard, *(process.pid for process in self._processes(workers))})
        finally:
            self._stop(self._processes(workers))
            _kill_children(besides=guard)
        reader.join(_STOP_SECONDS)
        code = self._code(workers)
        if code not in (0, _REFUSED) and self._plan.engine is None and self._is_news:
            self._tell_engine()
        return code

    def _processes(self, workers: subprocess.Popen[bytes]) -> list[subprocess.Popen[bytes]]:
        return [workers] if self._engine is None else [self._engine, workers]

    def _start_engine(self, command: list[str]) -> subprocess.Popen[bytes]:
        if self._plan.address is None:
            command = [*command[:3], f"--executor-address={self._address}", *command[3:]]
        return subprocess.Popen(
            [sys.executable, "-c", _ENGINE, *command], start_new_session=True, preexec_fn=_die_with_us
        )

    def _start_workers(self) -> subprocess.Popen[bytes]:
        plan = self._plan
        torchrun = ["--standalone", "--nproc-per-node", str(plan.local_size), "--tee", "3"]
        worker = ["--connect", self._address, "--first-rank", str(plan.first_rank)]
        if plan.key_file is not None:
            worker += ["--key-file", plan.key_file]
        cores = len(os.sched_getaffinity(0))
        environment = {
            "OMP_NUM_THREADS": str(max(1, cores // plan.local_size)),  # torchrun would make it 1
            "PYTHONUNBUFFERED": "1",
            **{name: value for name, value in os.environ.items() if not name.startswith(_TORCHRUN_OPTIONS)},
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": MARK,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *torchrun, "--log-dir", self._folder, "-m",
             "stepahead.worker", *worker],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=_die_with_us, env=environment, cwd=self._folder,
        )  # fmt: skip

    def _show(self, workers: subprocess.Popen[bytes]) -> None:
        """Each rank's lines, with its name in front. What torchrun itself says about a failure is in their lines too,
        but for the exit code."""
        assert workers.stdout is not None
        ranks = RankLines(self._plan.first_rank)
        others = "".join([ranks.take(line.decode(errors="replace")) for line in workers.stdout])
        ranks.end()
        self._failure = first_failure(others, ranks.raised, ranks.bereft)
        if self._failure is not None:
            self._is_news = self._failure.local_rank not in ranks.bereft
            rank = self._plan.first_rank + self._failure.local_rank
            if self._is_news:  # else it has said whom it misses, and the engine says why
                print(f"launch: rank {rank} {self._failure.how}", file=sys.stderr, flush=True)
        elif (code := workers.wait()) and not self._signals and not self._ends_them:
            said = [*others.rstrip().splitlines(), how_it_ended(code)]
            print("\n".join(f"[torchrun] {line}" for line in said), file=sys.stderr, flush=True)

    def _until_one_ends(self, processes: list[subprocess.Popen[bytes]]) -> None:
        """Passes signals on meanwhile; a second one is not waited for."""
        while all(process.poll() is None for process in processes) and len(self._signals) < 2:
            if self._signals:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(processes[0].pid, self._signals[0])
                if _wait_any(processes, _TERM_SECONDS, lambda: len(self._signals) > 1):
                    return
                self._signals.append(signal.SIGTERM)
            else:
                time.sleep(0.05)

    def _stop(self, processes: list[subprocess.Popen[bytes]]) -> None:
        """They get time, then SIGTERM, then SIGKILL."""
        engine_ended = self._engine is not None and self._engine.poll() is not None
        patience = _LEAVE_SECONDS if engine_ended and not self._signals else _STOP_SECONDS
        _wait_all(processes, patience if len(self._signals) < 2 else 0)
        for process in processes:
            if process.poll() is None:
                self._ends_them = True
                process.terminate()
        _wait_all(processes, _TERM_SECONDS)
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _code(self, workers: subprocess.Popen[bytes]) -> int:
        engine_code = 0 if self._engine is None else self._engine.returncode
        if self._signals:
            return engine_code if engine_code > 0 else 128 + self._signals[0]
        rank_code = 0 if self._failure is None else self._failure.exit_code
        own = rank_code if self._is_news else 0
        code = own or self._first_code or engine_code or rank_code or workers.returncode
        return code if code >= 0 else 128 - code

    def _tell_engine(self) -> None:
        """On another node. It may never have seen the worker of ours that has ended; one that it has refused is no
        news, and may be started anew."""
        from stepahead.worker.handshake import report_gone
        from stepahead.worker.link_key import read_key_file

        plan, failure = self._plan, self._failure
        assert plan.address is not None
        how = f"was stopped by {signal.Signals(self._signals[0]).name}" if self._signals else "could not be started"
        report_gone(
            plan.address,
            None if plan.key_file is None else read_key_file(plan.key_file),
            plan.first_rank + (0 if failure is None else failure.local_rank),
            0 if failure is None else failure.pid,
            f"{how if failure is None else failure.how} on {socket.gethostname()}",
        )


def _wait_any(processes: list[subprocess.Popen[bytes]], seconds: float, is_enough: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not is_enough():
        if any(process.poll() is not None for process in processes):
            return True
        time.sleep(0.05)
    return False


def _wait_all(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _adopt_orphans() -> None:
    """What a process that we have started leaves behind, when it is killed, becomes a child of ours, so that we can
    find it. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _kill_children(besides: set[int]) -> None:
    """And theirs: what the processes that have ended did not take with them."""
    import psutil

    for child in psutil.Process().children():
        if child.pid not in besides:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [*child.children(recursive=True), child]:
                    process.kill()


def _die_with_us() -> None:
    """In a child: SIGTERM when this process is killed. Linux only; elsewhere a SIGKILL of ours leaves them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    split = list(argv).index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a local folder, or a Hugging Face hub id")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer; default: 1")
    parser.add_argument("--pp", type=int, default=1, help="stages that share the layers; default: 1")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="machines; default: 1")
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="which of them this is, from 0")
    parser.add_argument("--head", metavar="HOST:PORT", help="node 0, as the others reach it, and a free port there")
    parser.add_argument("--key-file", metavar="FILE", help="made by stepahead keygen; the same on all machines")
    arguments, unknown = parser.parse_known_args(argv[:split])
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)} (what goes to the engine follows a --)")
    return arguments, list(argv[split + 1 :])


def _use_venv() -> None:
    """The checkout's own environment, where it has one."""
    python = VENV / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(python, [str(python), *sys.argv])


if __name__ == "__main__":
    _use_venv()
    sys.exit(main())
