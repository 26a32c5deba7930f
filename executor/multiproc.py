"""One worker process per device, all of them children of this one on this machine."""

from __future__ import annotations

import msgspec

from ..config import ResolvedConfig
from ..worker.child_process import ChildProcess, stop_all
from ..worker.process import WORKER_CLASS, WorkerChild
from ..worker.sockets import SocketDirectory
from .registration import Addresses
from .remote import RemoteExecutor

WORKER_MAIN = "stepahead.worker.process:main"


class MultiprocExecutor(RemoteExecutor):
    """Links are `ipc://` in a directory that only this user can enter, and that is gone once all are connected."""

    def __init__(self, config: ResolvedConfig, worker_class: str = WORKER_CLASS) -> None:
        self._directory = SocketDirectory()
        self._workers: list[ChildProcess] = []
        super().__init__(config, worker_class)

    def _bind(self) -> Addresses:
        addresses = Addresses(plans=self._directory.address("plans"), replies=self._directory.address("replies"))
        self._plans.bind(addresses.plans)
        self._replies.bind(addresses.replies)
        return addresses

    def _start_workers(self, address: str) -> None:
        for rank in range(self._world_size):
            message = msgspec.msgpack.encode(WorkerChild(address=address, rank=rank, local_size=self._world_size))
            worker = ChildProcess(WORKER_MAIN, f"stepahead-worker-{rank}", message, self._directory)
            self._workers.append(worker)
            self._watch_sentinel(worker.sentinel, rank)

    def _rendezvous(self) -> str:
        return f"file://{self._directory.path}/ranks"

    def _all_ready(self) -> None:
        self._directory.remove()

    def _exit_reason(self, rank: int) -> str:
        self._workers[rank].wait()
        return f"{self._workers[rank].exit_reason()}; see its error output above"

    def _end_workers(self, grace: float) -> None:
        stop_all(self._workers, grace)
        self._directory.remove()
