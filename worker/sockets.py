"""ZMQ sockets and the private directory that holds their `ipc://` paths. Importing this loads no torch.

The directory is needed only until both ends are connected, so its maker removes it then: nothing is left to leak,
and nobody else can connect, for the rest of the run. Until then every process that knows of it removes it when the
others have died (`remove_all_directories`). A process that was given one makes its own inside it: killed before it
could tell anybody, it leaves nothing that the giver does not remove.
"""

from __future__ import annotations

import os
import shutil
import tempfile

import zmq

SIGNAL_CHECK_MS = 1000
"""Longest single wait of a main thread. Python runs signal handlers between waits, and a signal that arrives just
before a wait begins does not interrupt it."""

_MAX_PATH = 103  # bytes in sockaddr_un: 107 on Linux, 103 on macOS
_LONGEST_NAME = 16
_directories: set[str] = set()
_given: list[str] = []


class SocketDirectory:
    """A directory that only this user can enter. path: given by the process that made it, or None to make one."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path or _make()
        _directories.add(self.path)
        if path is not None:
            _given.append(path)

    def address(self, name: str) -> str:
        assert len(name) <= _LONGEST_NAME
        return f"ipc://{self.path}/{name}"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # another process may be removing it too
        _directories.discard(self.path)


def remove_all_directories() -> None:
    for path in list(_directories):
        shutil.rmtree(path, ignore_errors=True)
    _directories.clear()


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, linger_ms: int = 0) -> zmq.Socket[bytes]:
    """A socket that drops nothing silently. It belongs to the thread that uses it first."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, linger_ms)
    return socket


def _make() -> str:
    inside = next(filter(os.path.isdir, _given), None)
    path = tempfile.mkdtemp(prefix="stepahead-", dir=inside)
    if len(os.fsencode(path)) + 1 + _LONGEST_NAME > _MAX_PATH:
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="stepahead-", dir="/tmp")
    return path
