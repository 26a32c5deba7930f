"""A TCP cable that can be cut: a proxy between a client and a server on this machine."""

from __future__ import annotations

import select
import socket
import threading


class Cable:
    """port: where to connect; `to` is the port that is reached through it.

    cut(): both ends of every connection are closed, and those of new ones at once. freeze(): nothing more
    gets through, and nobody is told.
    """

    def __init__(self, to: int) -> None:
        self._to = to
        self._is_cut = self._is_frozen = self._is_over = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._peers: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, name="cable", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._is_cut = True

    def freeze(self) -> None:
        self._is_frozen = True

    def close(self) -> None:
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over:
            if self._is_cut:
                self._drop_all()
            ends = [] if self._is_frozen else list(self._peers)
            for end in select.select([self._listener, *ends], [], [], 0.02)[0]:
                if end is self._listener:
                    self._join(self._listener.accept()[0])
                elif end in self._peers and not (self._is_cut or self._is_frozen):
                    self._pass_on(end)
        self._drop_all()
        self._listener.close()

    def _join(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self._to))
        except ConnectionRefusedError:
            near.close()
            return
        self._peers[near], self._peers[far] = far, near

    def _pass_on(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            self._peers[end].sendall(data)
        except OSError:
            data = b""
        if not data:
            for gone in (self._peers.pop(end), end):
                self._peers.pop(gone, None)
                gone.close()

    def _drop_all(self) -> None:
        for end in self._peers:
            end.close()
        self._peers.clear()
