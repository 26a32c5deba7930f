"""Starts a Python child process and ties its life to ours, in both directions.

The parent holds an exit descriptor for the child. The child watches its parent through two things, because
either alone can fail: its standard input is a pipe whose end means that the parent is gone (but a process that
the user forked may still hold the other end), and on Linux a pidfd of the parent. A child whose parent died kills
its own children, removes the socket directories, and exits.

`subprocess` rather than `multiprocessing`: a user's script is never imported again, so it needs no
`if __name__ == "__main__"` guard. Importing this loads no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import marshal
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from importlib import import_module

from . import standard_streams
from .sockets import SocketDirectory, remove_all_directories

# marshal and sys are built in: nothing in the current directory can stand in for them before sys.path is ours.
_BOOTSTRAP = f"""\
import marshal, sys
try:
    sys.path[:] = marshal.load(sys.stdin.buffer)
except EOFError:  # the parent is gone before it said anything; what it made for the two of us goes too
    import shutil
    shutil.rmtree(sys.argv[-1], ignore_errors=True)
    sys.exit(1)
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
from {__name__} import child_main
child_main()
"""

TERM_PATIENCE = 4.0
"""Seconds that a child gets between SIGTERM and SIGKILL."""

_TUNABLES = "GLIBC_TUNABLES"
_FOR_LARGE_TENSORS = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": 1 << 25,  # the largest that it takes
    "glibc.malloc.trim_threshold": 1 << 40,
    "glibc.malloc.arena_max": 1,  # other threads' arenas get no huge pages
}

_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def how_it_ended(exit_code: int | None) -> str:
    """ "exited with code 1", "was killed by SIGKILL". exit_code: as subprocess has it, below 0 a signal."""
    if exit_code is None or exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


class ChildProcess:
    """A child that runs `main(message)` and ignores Ctrl-C, which the terminal sends to the whole group.

    main: "package.module:function", imported in the child. label: what `ps` shows. message: bytes for main, or None
    when tell() is to bring them. directory: of the sockets between the two; the child removes it if the parent dies.
    sentinel: a file descriptor that becomes readable when the child is gone.
    """

    def __init__(self, main: str, label: str, message: bytes | None, directory: SocketDirectory) -> None:
        command = [sys.executable, "-c", _BOOTSTRAP, label, main, str(os.getpid()), directory.path]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:  # the child inherits the mask, so that Ctrl-C cannot hit it before it has said that it ignores it
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=for_large_tensors(os.environ))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.pid = self._process.pid
        try:
            self.sentinel = _exit_descriptor(self._process)
        except BaseException:
            self._process.kill()
            raise
        _children.add(self)
        assert self._process.stdin is not None
        self._lifeline = self._process.stdin
        if message is not None:
            self.tell(message)

    def tell(self, message: bytes) -> None:
        """What main waits for."""
        path = [str(entry) for entry in sys.path]
        with contextlib.suppress(BrokenPipeError):  # it died at once; the sentinel tells
            self._lifeline.write(marshal.dumps(path) + len(message).to_bytes(8, "little") + message)
            self._lifeline.flush()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the child is gone. timeout: seconds."""
        if self._process.poll() is None:
            if not wait_readable([self.sentinel], timeout):
                return False
            self._process.wait()
        return True

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def exit_reason(self) -> str:
        """Of a child that is gone, for a message: see how_it_ended."""
        code = self._process.returncode
        return how_it_ended(code) + (" (out of memory?)" if code == -signal.SIGKILL else "")

    def close(self) -> None:
        """Gives the descriptors back; a child still alive takes this as its parent's death."""
        if self._lifeline.closed:
            return
        with contextlib.suppress(BrokenPipeError):  # bytes it never read, because it is gone
            self._lifeline.close()
        os.close(self.sentinel)


def for_large_tensors(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process in which glibc asks for huge pages for whatever is large, and keeps what is freed.

    A step on a CPU reads every weight once. Through pages of 4 KiB much of that time goes to finding the pages, in a
    virtual machine twice over: 93 ms a step were 65. And memory that goes back to the kernel after each operation is
    cleared for the next one: a prefill of 2,048 tokens took 620 ms, and takes 520. Where glibc or the kernel knows no
    such thing, nothing happens; what the user has set in GLIBC_TUNABLES stays.
    """
    tunables = environment.get(_TUNABLES, "")
    ours = [f"{name}={value}" for name, value in _FOR_LARGE_TENSORS.items() if name not in tunables]
    return {**environment, _TUNABLES: ":".join(filter(None, (tunables, *ours)))}


def stop_all(children: Sequence[ChildProcess], grace: float, patience: float = TERM_PATIENCE) -> None:
    """Waits `grace` seconds for children told to stop, then SIGTERM, `patience` more, SIGKILL. Closes them."""
    for end_it, seconds in ((None, grace), (ChildProcess.terminate, patience), (ChildProcess.kill, 5.0)):
        deadline = time.monotonic() + seconds
        alive = [child for child in children if not child.wait(0)]
        for child in alive:
            if end_it is not None:
                end_it(child)
        for child in alive:
            child.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        child.close()


def wait_readable(descriptors: Sequence[int], timeout: float | None) -> list[int]:
    """Those of `descriptors` that are readable or closed at the other end, after `timeout` seconds at most."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    events = poll.poll(None if timeout is None else max(0, int(timeout * 1000 + 0.999)))
    return [descriptor for descriptor, _ in events]


def child_main() -> None:
    """Runs in the child: `python -c bootstrap label main parent_pid directory`."""
    standard_streams.open_missing()
    faulthandler.enable()
    threading.excepthook = _end_process
    _, _, main, parent_pid, directory = sys.argv
    SocketDirectory(directory)
    size = sys.stdin.buffer.read(8)
    message = sys.stdin.buffer.read(int.from_bytes(size, "little"))
    if len(size) < 8 or len(message) < int.from_bytes(size, "little"):
        remove_all_directories()
        sys.exit("the parent process died before it had said what to do")
    _watch_parent(int(parent_pid))
    module, _, function = main.partition(":")
    sys.exit(getattr(import_module(module), function)(message))


def _end_process(args: threading.ExceptHookArgs) -> None:
    """A thread that died of an exception would look like a hang; the parent sees an exit at once."""
    sys.__excepthook__(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


def _watch_parent(parent_pid: int) -> None:
    lifeline = os.dup(0)  # out of the way of whatever reads standard input
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    watched = [lifeline]
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or the parent is gone: the pipe tells
        watched.append(os.pidfd_open(parent_pid))
    orphan = os.getppid() != parent_pid  # then the pidfd may be a stranger's

    def watch() -> None:
        if not orphan:
            wait_readable(watched, None)
        for child in list(_children):
            child.kill()
        remove_all_directories()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _exit_descriptor(process: subprocess.Popen[bytes]) -> int:
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel without it
        return os.pidfd_open(process.pid)
    reader, writer = os.pipe()

    def wait() -> None:
        process.wait()
        os.close(writer)

    threading.Thread(target=wait, name="child-wait", daemon=True).start()
    return reader
