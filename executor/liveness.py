"""Whether workers are still there. A worker's *sentinel* is a descriptor that becomes readable when it is gone."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable

import msgspec
import zmq

from ..worker.child_process import wait_readable
from ..worker.handshake import Hello, machine_id
from ..worker.heart import INTERVAL_S, LONGEST_TURN_S, Beat
from ..worker.logs import Complaints
from ..worker.sockets import take

logger = logging.getLogger(__name__)

START_PATIENCE = 6.0
"""How many times longer a worker may be silent until it is ready for its first step: a library that takes long to
read, or a kernel to compile, holds up all of its threads."""

_MOST_BEATS = 10_000


class Monitor:
    """A thread that sleeps until a worker is gone."""

    def __init__(self, sentinels: list[int], on_failure: Callable[[], None]) -> None:
        self._wake_reader, self._wake_writer = os.pipe()
        self._sentinels = sentinels
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name="worker-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Before the sentinels are closed."""
        os.close(self._wake_writer)
        self._thread.join()
        os.close(self._wake_reader)

    def _run(self) -> None:
        if self._wake_reader not in wait_readable([self._wake_reader, *self._sentinels], None):
            self._on_failure()


class Heartbeats:
    """Watches workers that are not our children: each sends a beat a second, which goes back to it. Those of this
    machine are watched through a pidfd besides, so that their end is seen at once.

    link: a bound ROUTER, owned by this object's thread from now on, which closes it. timeout: seconds of silence after
    which a rank counts as gone.
    """

    def __init__(self, link: zmq.Socket[bytes], timeout: float) -> None:
        self._link = link
        self._timeout = timeout
        self._lock = threading.Lock()
        self._last: dict[int, float] = {}
        self._silenced: dict[int, int] = {}
        self._patience = START_PATIENCE
        self._complaints = Complaints(logger)
        self._decoder = msgspec.msgpack.Decoder(Beat)
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def watch(self, hello: Hello) -> tuple[int, int | None]:
        """Two sentinels of a worker that has come: for its silence, and its process if it is on this machine. The
        caller closes them, after stop()."""
        silence, writer = os.pipe()
        with self._lock:
            self._last[hello.rank] = time.monotonic()
            self._silenced[hello.rank] = writer
        if hello.machine == machine_id():
            with contextlib.suppress(AttributeError, OSError):  # no such call, or it is gone: silence tells
                return silence, os.pidfd_open(hello.pid)
        return silence, None

    def all_started(self) -> None:
        with self._lock:
            self._patience = 1.0

    def is_silent(self, rank: int) -> bool:
        with self._lock:
            return rank not in self._last

    def stop(self) -> None:
        os.close(self._wake_writer)
        self._thread.join()
        os.close(self._wake_reader)
        for writer in self._silenced.values():
            os.close(writer)
        self._silenced.clear()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._link, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        while True:
            began = time.monotonic()
            if self._wake_reader in dict(poller.poll(int(INTERVAL_S * 1000))):
                self._link.disable_monitor()  # whoever watches it still takes what libzmq says
                self._link.close()
                return
            for _ in range(_MOST_BEATS):
                frames = take(self._link)
                if frames is None:
                    break
                self._echo(frames)
            self._judge(time.monotonic() - began - LONGEST_TURN_S)

    def _echo(self, frames: list[bytes]) -> None:
        try:
            route, body = frames
            rank = self._decoder.decode(body).rank
        except (msgspec.MsgspecError, ValueError):
            self._complaints.log("dropped what is no beat of a worker from the health link")
            return
        with self._lock:
            if rank in self._last:
                self._last[rank] = time.monotonic()
        self._link.send_multipart([route, body])

    def _judge(self, excess: float) -> None:
        """excess: seconds that the turn took over its longest; above 0 this process itself has stood still."""
        with self._lock:
            if excess > 0:
                now = time.monotonic()
                self._last = {rank: min(last + excess, now) for rank, last in self._last.items()}
                return
            since = time.monotonic() - self._timeout * self._patience
            for rank in [rank for rank, last in self._last.items() if last < since]:
                del self._last[rank]
                os.close(self._silenced.pop(rank))


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
