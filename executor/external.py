"""Workers that somebody else starts, on this machine or others: torchrun, SLURM, Kubernetes, a person.

Each runs `python -m stepahead.worker --connect ADDRESS`; the executor waits until all have come, for
`join_timeout` at most.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import TYPE_CHECKING

import zmq

from ..config import ResolvedConfig
from ..errors import ConfigError, WorkerError
from ..worker.addresses import is_loopback, is_wildcard, split_tcp
from ..worker.child_process import wait_readable
from ..worker.engine_link import PROBE
from ..worker.handshake import Hello
from ..worker.link_key import LinkKey, admit_only, read_key_file
from ..worker.process import WORKER_CLASS
from ..worker.sockets import open_socket
from .address_claim import AddressClaim
from .links import LinkWatch, allow_many_connections, bind, drop_silent_peer, limit, reply_limit
from .liveness import START_PATIENCE, Heartbeats, close_all
from .registration import Addresses
from .remote import RemoteExecutor

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

logger = logging.getLogger(__name__)

_FIRST_CALL_S = 5.0
CALL_AGAIN_S = 30.0
_HELLO_LIMIT, _BEAT_LIMIT = 1 << 12, 1 << 11
_LEAST_GRACE_S = 0.5
_FAREWELL_MS = 2000
"""How long the news that it is over may take on its way to workers of other machines."""


class ExternalExecutor(RemoteExecutor):
    """address: where workers connect, known once it is bound. key: what they must have."""

    address: str
    key: LinkKey | None

    def __init__(self, config: ResolvedConfig, worker_class: str = WORKER_CLASS) -> None:
        self._gate: ThreadAuthenticator | None = None
        self._link_watch: LinkWatch | None = None
        self._heartbeats: Heartbeats | None = None
        self._claim: AddressClaim | None = None
        self._call_at = time.monotonic() + _FIRST_CALL_S
        self._processes: list[int] = []
        super().__init__(config, worker_class)

    def _bind(self) -> Addresses:
        timeout = self.config.settings.worker_timeout
        self.key = self._link_key()
        where = self._where_to_listen()
        if where.startswith("ipc://"):
            self._claim = AddressClaim(where)
        allow_many_connections()
        health = open_socket(self._context, zmq.ROUTER)
        links = {"plans": self._plans, "replies": self._replies, "health": health}
        limits = {"plans": _HELLO_LIMIT, "replies": reply_limit(self.config), "health": _BEAT_LIMIT}
        if self.key is not None:
            self._gate = admit_only(self._context, self.key)
        self._link_watch = LinkWatch(links, limits)
        for name, link in links.items():
            limit(link, limits[name])
            drop_silent_peer(link, where, timeout * START_PATIENCE)
            if self.key is not None:
                self.key.guard(link)
        bound = {}
        for name, link in links.items():
            bound[name] = bind(link, where, name)
            if self._claim is not None:
                self._claim.sockets.append(bound[name].removeprefix("ipc://"))
        self._heartbeats = Heartbeats(health, timeout)
        self.address = bound["plans"]
        return Addresses(bound["plans"], bound["replies"], bound["health"], limits["replies"])

    def _link_key(self) -> LinkKey | None:
        key_file = self.config.settings.key_file
        return None if key_file is None else read_key_file(key_file)

    def _where_to_listen(self) -> str:
        return self.config.settings.executor_address

    def _start_workers(self, address: str) -> None:
        logger.info("waiting for %d workers: %s", self._world_size, self._how_to_come())

    def _wait_longer(self) -> None:
        now = time.monotonic()
        if now > self._call_at and self._registration is not None:
            self._call_at = now + CALL_AGAIN_S
            ranks = ", ".join(map(str, self._registration.missing))
            logger.warning("still waiting for ranks %s: %s", ranks, self._how_to_come())

    def _how_to_come(self) -> str:
        where = self.address
        if where.startswith("tcp://") and is_wildcard(split_tcp(where)[0]):
            where = f"tcp://{socket.gethostname()}:{split_tcp(where)[1]}"
        key = f" --key-file {self.config.settings.key_file}" if self.key is not None else ""
        place = "--rank RANK --local-rank GPU (both from 0; torchrun and SLURM say them)"
        return f"python -m stepahead.worker --connect {where}{key} {place}"

    def _welcome(self, hello: Hello) -> None:
        assert self._heartbeats is not None
        silence, process = self._heartbeats.watch(hello)
        self._watch_sentinel(silence, hello.rank)
        if process is not None:
            self._watch_sentinel(process, hello.rank)
            self._processes.append(process)

    def _rendezvous(self) -> str:
        assert self._registration is not None
        hellos = self._registration.hellos
        meeting = hellos[0].rendezvous
        if meeting is None or not meeting.startswith("tcp://"):
            raise WorkerError(0, "did not say where the other ranks find it")
        if is_loopback(split_tcp(meeting)[0]):
            for hello in hellos.values():
                if hello.host != hellos[0].host:
                    raise ConfigError(
                        f"rank 0 (on {hellos[0].host}) has come over loopback, where rank {hello.rank} on "
                        f"{hello.host} cannot find it: let it connect to an address that all machines reach"
                    )
        return meeting

    def initialize_cache(self, num_blocks: int, max_model_len: int) -> None:
        super().initialize_cache(num_blocks, max_model_len)
        assert self._heartbeats is not None
        self._heartbeats.all_started()

    def _check_links(self) -> None:
        if self._registration is not None and self._registration.is_closed:
            self._send_to_all([PROBE])

    def _exit_reason(self, rank: int) -> str:
        assert self._heartbeats is not None
        assert self._registration is not None
        hello = self._registration.hellos[rank]
        where = f"(pid {hello.pid} on {hello.host})"
        if self._heartbeats.is_silent(rank):
            return f"was not heard of for {self.config.settings.worker_timeout:g} seconds {where}"
        return f"is gone {where}; see its own error output"

    def _end_workers(self, grace: float) -> None:
        """They are not ours to kill: each leaves when it is told to, or hears no more of us."""
        if self._link_watch is not None:
            self._link_watch.hush()
        deadline = time.monotonic() + max(grace, _LEAST_GRACE_S)
        remaining = self._processes
        while remaining and (left := deadline - time.monotonic()) > 0:
            gone = wait_readable(remaining, left)
            remaining = [process for process in remaining if process not in gone]
        if self._heartbeats is not None:
            self._heartbeats.stop()
        if self._link_watch is not None:
            self._link_watch.stop()
        self._plans.close(linger=_FAREWELL_MS)
        close_all(self._sentinels)
        self._sentinels.clear()
        if self._claim is not None:
            self._claim.release()
        if self._gate is not None:
            self._gate.stop()

    def _allows_callables(self) -> bool:
        return self.key is not None or self.config.settings.executor_address.startswith("ipc://")
