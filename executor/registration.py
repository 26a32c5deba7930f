"""Which workers have come: each says who it is, and is taken or told why not."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ..config import ResolvedConfig
from ..errors import WorkerError
from ..worker.codec import Codec
from ..worker.handshake import PROTOCOL, REPORT_S, Gone, Hello, Refused, Start
from ..worker.logs import Complaints

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Addresses:
    """Of bound sockets. health: of a `liveness.Heartbeats`, where workers need it. longest_reply: bytes, where there
    is a limit."""

    plans: str
    replies: str
    health: str | None = None
    longest_reply: int | None = None


class _AnyHello(msgspec.Struct, frozen=True, array_like=True):
    """What is the same in every version of the protocol."""

    protocol: int


class Registration:
    """routes: by rank, what the ROUTER calls the worker. hellos: by rank.

    Until close() a worker whose link broke may come again.
    """

    def __init__(self, config: ResolvedConfig, worker_class: str, addresses: Addresses) -> None:
        self.routes: dict[int, bytes] = {}
        self.hellos: dict[int, Hello] = {}
        self.is_closed = False
        self._config = config
        self._worker_class = worker_class
        self._addresses = addresses
        self._began = time.monotonic()
        self._complaints = Complaints(logger)
        self._codec: Codec[Start | Refused] = Codec(Start | Refused)

    @property
    def is_complete(self) -> bool:
        return len(self.routes) == self._config.settings.world_size

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self._config.settings.world_size) if rank not in self.routes]

    def overdue(self) -> WorkerError:
        """Names the missing ranks."""
        rank, *others = self.missing
        too = f"; neither have ranks {', '.join(map(str, others))}" if others else ""
        return WorkerError(rank, f"has not come within {self._config.settings.join_timeout:g} s (join_timeout){too}")

    def answer(self, route: bytes, frames: list[bytes]) -> tuple[Hello | None, list[bytes] | None]:
        """frames: what a stranger at `route` has sent. Returns: who it is if it was taken for the first time, and the
        answer if it deserves one. Raises: WorkerError when it says that a worker which is awaited has ended."""
        protocol = _decode(frames, _AnyHello)
        if protocol is None:
            self._complaints.log("dropped a message that is no worker's greeting")
            return None, None
        if protocol.protocol == PROTOCOL and (gone := _decode(frames, Gone)) is not None:
            self._believe(gone)
            return None, None
        hello = _decode(frames, Hello)
        if self.is_closed and route in self.routes.values():
            return None, None  # it had greeted once more before it was answered
        refusal = self._refusal(protocol.protocol, hello)
        if refusal is not None or hello is None:
            who = "somebody" if hello is None else f"{hello.host!r}, pid {hello.pid}"
            self._complaints.log(f"refused a worker ({who}): {refusal}", "refused")
            return None, self._codec.encode(Refused(refusal or ""))
        is_new = hello.rank not in self.hellos
        self.routes[hello.rank] = route
        self.hellos[hello.rank] = hello
        logger.info("rank %d has come: %s, pid %d", hello.rank, hello.host, hello.pid)
        addresses = self._addresses
        start = Start(
            self._config,
            hello.rank,
            self._worker_class,
            addresses.replies,
            addresses.health,
            addresses.longest_reply,
        )
        return hello if is_new else None, self._codec.encode(start)

    def close(self) -> None:
        """Every worker has come, and is about to be told so."""
        self.is_closed = True

    def _believe(self, gone: Gone) -> None:
        """Of ranks that have come only what their own launch says counts; of one that has not, that it never will: but
        not when it was turned away, for another may fit, nor when it ended before we began, for it was not ours."""
        is_old = gone.seconds > time.monotonic() - self._began + REPORT_S
        for rank in gone.ranks if not self.is_closed else ():
            hello = self.hellos.get(rank)
            counts = not (is_old or gone.is_refused) if hello is None else hello.launch == gone.launch
            if counts and rank < self._config.settings.world_size:
                raise WorkerError(gone.ranks[0], f"{gone.reason}; see its own error output")
        self._complaints.log(f"ranks {gone.ranks} are said to be gone, which changes nothing", "gone")

    def _refusal(self, protocol: int, hello: Hello | None) -> str | None:
        world_size = self._config.settings.world_size
        if protocol != PROTOCOL:
            return f"it speaks version {protocol} of the protocol, not {PROTOCOL}: is it another stepahead?"
        if hello is None:
            return "its greeting makes no sense"
        if hello.rank >= world_size:
            expected = f"the {world_size} that are expected (0 to {world_size - 1})"
            return f"rank {hello.rank} is not among {expected}: was the engine asked for another size?"
        taken = self.hellos.get(hello.rank)
        if taken is not None and (self.is_closed or _process(taken) != _process(hello)):
            return f"rank {hello.rank} has come already (from {taken.host}, pid {taken.pid})"
        if hello.local_rank >= max(1, hello.local_size):
            return f"local rank {hello.local_rank} is not below the {hello.local_size} of its machine"
        return None


def _process(hello: Hello) -> tuple[str, str, int]:
    return hello.machine, hello.host, hello.pid


def _decode(frames: list[bytes], kind: type[T]) -> T | None:
    if len(frames) != 1:
        return None
    try:
        return msgspec.msgpack.decode(frames[0], type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
