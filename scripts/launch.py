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
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launch_plan import LaunchPlan, make_plan
from torchrun_output import MARK, RankFailure, RankLines, first_failure

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
_TORCHRUN_PREFIX = "PET_"
"""Of its options in the environment. Set for another torchrun, they would change ours."""

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
        self._torchrun_code = 0
        self._name = secrets.token_hex(8)
        self._end_began = 0.0
        self._ends_them = False

    def run(self) -> int:
        import psutil

        from stepahead.worker.child_process import how_it_ended

        _adopt_orphans()
        guard = {child.pid for child in psutil.Process().children()}  # of the private folder
        for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(caught, lambda number, _: self._take_signal(number))
        workers = self._start_workers()
        reader = threading.Thread(target=self._show, args=(workers,), name="worker-output", daemon=True)
        reader.start()
        try:
            if self._plan.engine is not None:
                self._engine = self._start_engine(self._plan.engine)
            self._until_one_ends(self._processes(workers))
            self._end_began = self._end_began or time.monotonic()
            self._torchrun_code = workers.poll() or 0
            if self._engine is not None and (self._engine.poll() or 0) < 0 and not self._signals:
                print(f"launch: the engine {how_it_ended(self._engine.returncode)}", file=sys.stderr, flush=True)
            if workers.poll() is not None:  # if it was killed, its ranks are still there, and the engine goes on
                _kill_children(besides={*guard, *(process.pid for process in self._processes(workers))})
        finally:
            self._stop(self._processes(workers))
            _kill_children(besides=guard)
        reader.join(_STOP_SECONDS)
        code = self._code(workers)
        if code and self._plan.engine is None and self._is_news:
            self._tell_engine(code)
        return code

    def _take_signal(self, number: int) -> None:
        self._signals.append(number)
        self._end_began = self._end_began or time.monotonic()

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
        worker = ["--connect", self._address, "--first-rank", str(plan.first_rank), "--launch", self._name]
        if plan.key_file is not None:
            worker += ["--key-file", plan.key_file]
        cores = len(os.sched_getaffinity(0))
        environment = {
            "OMP_NUM_THREADS": str(max(1, cores // plan.local_size)),  # torchrun would make it 1
            "PYTHONUNBUFFERED": "1",
            **{name: value for name, value in os.environ.items() if not name.startswith(_TORCHRUN_PREFIX)},
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
        from stepahead.worker.child_process import how_it_ended

        assert workers.stdout is not None
        ranks = RankLines(self._plan.first_rank)
        others = "".join([ranks.take(line.decode(errors="replace")) for line in workers.stdout])
        ranks.end()
        self._failure = first_failure(others, ranks.raised, ranks.bereft)
        if self._failure is not None:
            self._is_news = self._failure.local_rank not in ranks.bereft
            rank = self._plan.first_rank + self._failure.local_rank
            if self._is_news:  # else it has said whom it misses, and the engine says why
                print(f"launch: rank {rank} {how_it_ended(self._failure.exit_code)}", file=sys.stderr, flush=True)
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
        torchrun_code = self._torchrun_code if self._failure is None else 0
        code = own or torchrun_code or engine_code or rank_code or workers.returncode
        return code if code >= 0 else 128 - code

    def _tell_engine(self, code: int) -> None:
        """On another node. It may never have seen the workers of ours that have ended."""
        import zmq

        from stepahead.errors import StepaheadError
        from stepahead.worker.child_process import how_it_ended
        from stepahead.worker.handshake import PROTOCOL, Gone, report
        from stepahead.worker.link_key import read_key_file

        plan, failure = self._plan, self._failure
        assert plan.address is not None
        failed = plan.first_rank + (0 if failure is None else failure.local_rank)
        ours = range(plan.first_rank, plan.first_rank + plan.local_size)
        how = f"has lost its torchrun, which {how_it_ended(self._torchrun_code)}"
        if failure is not None:
            how = how_it_ended(failure.exit_code)
        elif self._signals:
            how = f"was stopped by {signal.Signals(self._signals[0]).name}"
        gone = Gone(
            protocol=PROTOCOL,
            launch=self._name,
            ranks=sorted(ours, key=lambda rank: rank != failed),
            seconds=time.monotonic() - self._end_began,
            reason=f"{how} on {socket.gethostname()}",
            is_refused=code == _REFUSED,
        )
        with contextlib.suppress(StepaheadError, zmq.ZMQError):  # the key file is gone, say: the exit code tells it too
            report(gone, plan.address, None if plan.key_file is None else read_key_file(plan.key_file))


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
