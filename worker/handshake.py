"""How a worker and its engine meet, whoever started the worker. Importing this loads no torch.

worker                                engine
Hello (rank, machine, …)       ───▶   checks it; said again whenever the link had to be made anew
                               ◀───   Start (settings, addresses), or Refused (why): the worker then ends
                               ◀───   Join, once every rank has come: where the ranks find each other
Ready, on the replies' link    ───▶

Gone, of workers that ended too early for the engine to see it, comes from whoever had started them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ..config import ResolvedConfig
from ..errors import ConfigError
from .addresses import split_tcp
from .codec import Codec, CodecError
from .engine_link import EngineLink
from .link_key import GIVE_UP_WEIGHT, LinkKey, explain_refused_link, weight_of_failure
from .messages import Shutdown
from .sockets import SIGNAL_CHECK_MS, connect, open_socket, take

logger = logging.getLogger(__name__)

PROTOCOL = 3
"""Of all messages between executor and worker. Both ends must have the same."""

_COUNT_S = 10.0
"""An engine that ends now and then while its workers wait has not refused them."""

JOIN_TIMEOUT_S = 600.0
"""How long a worker waits for an engine: as long as one waits for its workers by itself (the setting join_timeout).
How long ranks that an engine has wait for each other is `distributed.MEETING_TIMEOUT`."""

_SILENT_S, _SILENT_AGAIN_S = 10.0, 30.0
"""When a worker says that nobody answers it: a mistyped address looks like an engine that is still to come."""

REPORT_S = 2.0
"""How long whoever reports the end of workers waits for the engine."""

_Small = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Name = Annotated[str, msgspec.Meta(max_length=255)]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says first. protocol stays in its place in every version. launch: see Gone.

    local_rank: which of its machine's GPUs. local_size: how many of the ranks are on its machine. host: for people.
    machine: equal to ours when its pid means the same process here. rendezvous: rank 0's, "tcp://host:port", where
    it listens for the other ranks.
    """

    protocol: _Small
    rank: _Small
    local_rank: _Small
    local_size: _Small
    host: _Name
    pid: _Small
    machine: _Name
    rendezvous: _Name | None = None
    launch: _Name | None = None


class Gone(msgspec.Struct, frozen=True, array_like=True):
    """A launch of workers has ended. Told from Hello by its second field's type.

    launch: what its workers' Hellos say, and no other launch's. ranks: its workers, the one that ended it first.
    seconds: since then. reason: "exited with code 1". is_refused: the engine has turned that one away.
    """

    protocol: _Small
    launch: _Name
    ranks: Annotated[list[_Small], msgspec.Meta(min_length=1, max_length=1 << 10)]
    seconds: float
    reason: _Name
    is_refused: bool


class Start(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """worker_class: "package.module:Class". replies, health: addresses that the executor has bound; in a tcp:// one
    only the port counts, the host is the one that the worker reached already. health: None when the executor and the
    worker see each other's end anyhow. longest_reply: bytes; who sends more is cut off."""

    config: ResolvedConfig
    rank: int
    worker_class: str
    replies: str
    health: str | None = None
    longest_reply: int | None = None


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Stays as it is in every version of the protocol."""

    reason: str


class Join(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Every rank has come. rendezvous: torch.distributed's address, None for the only rank."""

    rendezvous: str | None


class RefusedError(ConfigError):
    """The engine does not take this worker."""


@dataclass(frozen=True)
class Place:
    """rank: stage * tensor_parallel_size + rank within the stage. local_rank, local_size, launch: see Hello."""

    rank: int
    local_rank: int
    local_size: int
    launch: str | None = None


class Listener:
    """Rank 0's end of the ranks' rendezvous: it listens before anybody is told the port, so nobody else can take it.

    address: "tcp://host:port", on the address of this machine through which it reaches the engine.
    """

    def __init__(self, engine: str) -> None:
        host = own_address(engine)
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = self._socket.getsockname()[1]
        self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def detach(self) -> int:
        """The descriptor, for whoever serves the rendezvous."""
        return self._socket.detach()


def own_address(engine: str) -> str:
    """This machine's address on the way to the engine; nothing is sent. engine: "tcp://host:port" or "ipc://…".

    Raises: ConfigError when the host is not known.
    """
    if not engine.startswith("tcp://"):
        return "127.0.0.1"
    host, port = split_tcp(engine)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"cannot reach {engine}: {error.strerror or error}") from error


def machine_id() -> str:
    """Equal in two processes when each can name the other by its pid: same boot, same pid namespace."""
    with contextlib.suppress(OSError):  # not Linux: nobody is on the same machine then
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"unknown {os.urandom(8).hex()}"


def register(
    link: EngineLink,
    address: str,
    place: Place,
    key: LinkKey | None,
    rendezvous: str | None,
    timeout: float = JOIN_TIMEOUT_S,
) -> Start:
    """Connects, and waits until an engine has answered, for `timeout` seconds at most. Whoever is at the other end
    of a new connection is greeted: an engine may end before it has answered, and another one take its address.

    Raises: RefusedError.
    """
    hello = Hello(
        protocol=PROTOCOL,
        rank=place.rank,
        local_rank=place.local_rank,
        local_size=place.local_size,
        host=socket.gethostname()[:255],
        pid=os.getpid(),
        machine=machine_id(),
        rendezvous=rendezvous,
        launch=place.launch,
    )
    greeting = msgspec.msgpack.encode(hello)
    codec: Codec[Start | Refused] = Codec(Start | Refused)
    link.connect(address, key)
    poller = zmq.Poller()
    poller.register(link.socket, zmq.POLLIN)
    poller.register(link.events, zmq.POLLIN)
    is_up, failures, counted_since = False, 0, time.monotonic()
    call_at, give_up_at = counted_since + _SILENT_S, counted_since + timeout
    while True:
        ready = dict(poller.poll(SIGNAL_CHECK_MS))
        if time.monotonic() > call_at:
            call_at = time.monotonic() + _SILENT_AGAIN_S
            logger.warning("rank %d: no engine answers at %s; still trying", place.rank, address)
        if time.monotonic() > give_up_at:
            raise RefusedError(f"rank {place.rank}: no engine has answered at {address} within {timeout:g} seconds")
        if link.events in ready:  # first: they say whether a message is of the link that is up now
            event = recv_monitor_message(link.events)["event"]
            is_up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if is_up:
                link.socket.send(greeting)
            if time.monotonic() - counted_since > _COUNT_S:
                failures, counted_since = 0, time.monotonic()
            failures += weight_of_failure(event)
            if failures >= GIVE_UP_WEIGHT:
                raise RefusedError(explain_refused_link(address, key))
        elif link.socket in ready:
            frames = take(link.socket)
            if is_up and frames is not None:
                return _accepted(codec, frames)


def report(gone: Gone, address: str, key: LinkKey | None) -> None:
    """To the engine, if there is one. For whoever has started the workers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with open_socket(context, zmq.DEALER, int(REPORT_S * 1000)) as link:
        if key is not None:
            key.present(link)
        connect(link, address)
        link.send(msgspec.msgpack.encode(gone))
    context.term()


def await_join(link: EngineLink) -> Join | Shutdown:
    """Shutdown when the engine ends before all ranks have come. Raises: LinkLostError."""
    codec: Codec[Join | Shutdown | Start] = Codec(Join | Shutdown | Start)
    while True:
        word = codec.decode(link.receive())
        if not isinstance(word, Start):  # another one answers a greeting whose link broke
            return word


def _accepted(codec: Codec[Start | Refused], frames: list[bytes]) -> Start:
    try:
        answer = codec.decode(frames)
    except CodecError as error:
        raise RefusedError(f"what answers there is no engine of this version: {error}") from error
    if isinstance(answer, Refused):
        raise RefusedError(f"the engine refused this worker: {answer.reason}")
    return answer
