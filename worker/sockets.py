"""ZMQ sockets and the private directory that holds their `ipc://` paths. Importing this loads no torch.

The directory is needed only until both ends are connected, so its maker removes it then: nothing is left to leak,
and nobody else can connect, for the rest of the run. Until then every process that knows of it removes it when the
others have died (`remove_all_directories`). A process that was given one makes its own inside it: killed before it
could tell anybody, it leaves nothing that the giver does not remove. The first process of all has no giver: it picks
a path, starts the process that is to know of it, and only then makes it (`SocketDirectory.unmade`).
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
import threading

import zmq

from .addresses import is_utf8, split_tcp

SIGNAL_CHECK_MS = 1000
"""Longest single wait of a main thread. Python runs signal handlers between waits, and a signal that arrives just
before a wait begins does not interrupt it."""

_MAX_PATH = 103  # bytes in sockaddr_un: 107 on Linux, 103 on macOS
_LONGEST_NAME = 16
_REMOVALS = 3
_directories: dict[str, int] = {}
"""Each path, and the process that knows of it: a forked copy of this one must not remove it."""
_given: list[str] = []
_making = threading.Lock()
_ending = False
"""Once remove_all_directories() has begun, nothing is made that it would miss."""


class SocketDirectory:
    """A directory that only this user can enter. path: given by the process that made it, or None to make one."""

    def __init__(self, path: str | None = None) -> None:
        if path is not None:
            _given.append(path)
        self.path = path or _fresh_path()
        _directories[self.path] = os.getpid()
        if path is None:
            self.make()

    @classmethod
    def unmade(cls) -> SocketDirectory:
        """One that make() is still to make, once somebody else knows its path too and removes it if we are killed."""
        directory = cls.__new__(cls)
        directory.path = _fresh_path()
        _directories[directory.path] = os.getpid()
        return directory

    def make(self) -> None:
        """Raises: FileExistsError when somebody was there first."""
        with _making:
            if _ending:
                raise RuntimeError("this process is ending: it opens no more sockets")
            os.mkdir(self.path, 0o700)

    def address(self, name: str) -> str:
        assert len(name) <= _LONGEST_NAME
        return f"ipc://{self.path}/{name}"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)  # another process may be removing it too
        _directories.pop(self.path, None)


def remove_all_directories() -> None:
    """Those that this process knows of. It ends now, whatever its threads are about: also a socket that another thread
    binds meanwhile goes."""
    global _ending
    with _making:
        _ending = True
    for path, pid in list(_directories.items()):
        for _ in range(_REMOVALS):
            if pid == os.getpid() and os.path.exists(path):
                shutil.rmtree(path, ignore_errors=True)


def _remove_made_directories() -> None:
    """What an exception in the middle of remove() has left."""
    for path, pid in list(_directories.items()):
        if pid == os.getpid() and path not in _given:
            shutil.rmtree(path, ignore_errors=True)


atexit.register(_remove_made_directories)


def beside(address: str, known: str) -> str:
    """A bound tcp:// address as seen from where `known`, another one of the same process, was reached: its port there.
    The binder may have bound a wildcard, or have a name only it understands."""
    if not address.startswith("tcp://") or not known.startswith("tcp://"):
        return address
    return f"{known.rpartition(':')[0]}:{split_tcp(address)[1]}"


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, linger_ms: int = 0) -> zmq.Socket[bytes]:
    """A socket without high-water marks, for one thread at a time."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, linger_ms)
    return socket


def take(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """A message, if there is one. What poll() says is not enough: with CURVE, libzmq counts the peer's credential,
    which the answer to its first heartbeat lets through alone, and then a plain recv waits for ever."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK) if socket.poll(0) else None
    except zmq.Again:  # raised and caught, it costs more than to ask first
        return None


def connect(socket: zmq.Socket[bytes], address: str) -> None:
    """address: a bound one; of an IPv6 address, in brackets."""
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.connect(address)


def _fresh_path() -> str:
    inside = next(filter(os.path.isdir, _given), tempfile.gettempdir())
    name = f"stepahead-{secrets.token_hex(6)}"
    return os.path.join(folder_for_sockets(inside, len(name) + 1 + _LONGEST_NAME), name)


def folder_for_sockets(folder: str, room: int) -> str:
    """`folder`, or /tmp where a path in it, `room` bytes longer, would not do for a socket or could not be told to
    another process."""
    return folder if is_utf8(folder) and len(os.fsencode(folder)) + 1 + room <= _MAX_PATH else "/tmp"
