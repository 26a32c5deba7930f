"""What Ray runs for each rank: an actor that keeps a worker in a process of its own. Importing this loads no torch.

A worker has its own signals, allocator settings and threads, which it would share with Ray's in the actor's process.
"""

from __future__ import annotations

import os

import msgspec

from ..worker.child_process import ChildProcess, stop_all
from ..worker.handshake import Listener, Place
from ..worker.link_key import LinkKey
from ..worker.process import run_worker
from ..worker.sockets import SocketDirectory

_MAIN = f"{__name__}:main"


class RayWorker(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a process that is to be a worker. local_rank: of the devices that Ray lets it see.

    secret, public: see `LinkKey`.
    """

    address: str
    rank: int
    local_rank: int
    local_size: int
    secret: bytes
    public: bytes


class StepaheadWorker:
    """The actor. Its worker dies with it."""

    def run(self, message: bytes) -> str:
        """Returns when the worker is gone: how it ended. message: a RayWorker."""
        os.dup2(2, 1)  # what Ray passes on as the driver's output must not be taken for the engine's
        worker = msgspec.msgpack.decode(message, type=RayWorker)
        label = f"stepahead-worker-{worker.rank}"
        child = ChildProcess(_MAIN, label, message, SocketDirectory.unmade())  # no sockets lie between the two
        try:
            child.wait()
            return child.exit_reason()
        finally:
            stop_all([child], grace=0)


def main(message: bytes) -> int:
    worker = msgspec.msgpack.decode(message, type=RayWorker)
    place = Place(worker.rank, worker.local_rank, worker.local_size)
    listener = Listener(worker.address) if worker.rank == 0 else None
    return run_worker(worker.address, place, LinkKey(worker.secret, worker.public), listener)
