"""A worker process: receives the engine's RPCs in order, hands them to the Worker, never waits for the device.

Replies leave through the WorkerAsyncOutputCopy thread alone, so results, call replies and failures share one
socket and one order. torch is imported inside `main`, after there is a way to report that it failed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from ..config import ResolvedConfig
from ..errors import ConfigError, LinkLostError
from .callables import unpack_callable
from .codec import Codec, CodecError, require_plain
from .engine_link import EngineLink
from .failure import failure
from .handshake import JOIN_TIMEOUT_S, Join, Listener, Place, Start, await_join, register
from .heart import start_beating
from .link_key import LinkKey
from .logs import log_to_stderr, phase
from .messages import Call, CallReply, ExecuteModel, Failure, Ready, Rendezvous, Shutdown, WorkerReply, WorkerRpc
from .sockets import beside, connect, open_socket

if TYPE_CHECKING:
    from .async_output import WorkerAsyncOutputCopy
    from .worker import Worker

logger = logging.getLogger(__name__)

WORKER_CLASS = "stepahead.worker.worker:Worker"

REPLY_LINGER_MS = 2000
"""How long a worker that exits waits for its last reply to be taken."""

_NEVER_MS = 1 << 30
"""Long after a worker that has lost its link is gone: another engine at the same address gets none of its replies."""

ENGINE_HAS_FAILED = "the engine has failed; leaving"

LEAVE_SECONDS = 5.0
"""How long a worker that ends may take."""


class WorkerChild(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor tells a child process that is to be a worker: whom to ask for everything else, and as whom."""

    address: str
    rank: int
    local_size: int


def main(message: bytes) -> int:
    child = msgspec.msgpack.decode(message, type=WorkerChild)
    return run_worker(child.address, Place(child.rank, child.rank, child.local_size))


def run_worker(
    address: str,
    place: Place,
    key: LinkKey | None = None,
    listener: Listener | None = None,
    join_timeout: float = JOIN_TIMEOUT_S,
) -> int:
    """A worker's whole life, whoever started its process. Returns the exit code: 0 when the engine has ended it.

    address: where the executor listens. listener: rank 0's, for an executor that leaves it to the ranks to meet.
    join_timeout: seconds in which an engine must have answered.
    Raises: RefusedError.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plans = EngineLink(context)
    link = _ReplyLink(context)
    end = _EndInAnyCase()
    try:
        meeting = None if listener is None else listener.address
        start = register(plans, address, place, key, meeting, join_timeout)
        log_to_stderr(f"worker {start.rank}", start.config.settings.log_level)
        if start.health is not None:
            health = beside(start.health, address)
            start_beating(context, health, key, start.rank, start.config.settings.worker_timeout)
            plans.watch(link.socket)
        link.open(start, beside(start.replies, address), key)
        allow_callables = address.startswith("ipc://") or key is not None
        return _run(start, plans, link, lambda join: _rendezvous(join, place, listener), allow_callables, end)
    finally:
        link.close()
        plans.close()
        context.term()  # waits for the last reply to be taken, REPLY_LINGER_MS at most
        end.reached()


def _run(
    start: Start,
    plans: EngineLink,
    link: _ReplyLink,
    rendezvous: Callable[[Join], Rendezvous | None],
    allow_callables: bool,
    end: _EndInAnyCase,
) -> int:
    try:
        from .async_output import WorkerAsyncOutputCopy

        with phase(logger, "importing torch"):
            import torch  # noqa: F401

        join = await_join(plans)
        if isinstance(join, Shutdown):
            return link.exit_code(join)
        worker = make_worker(start.worker_class, start.config, start.rank, rendezvous(join))
        ready = Ready(worker.info())
    except Exception as error:
        link.send(failure(start.rank, error))
        end.begin()
        return 1
    replies = WorkerAsyncOutputCopy(
        link.send,
        start.rank,
        lane=worker.copy_lane,
        tells_tokens=start.rank == start.config.settings.output_rank,
    )
    replies.start()
    try:
        replies.put(ready)
        last_word = serve(worker, start.rank, plans.receive, replies, allow_callables)
        end.begin()
        worker.shutdown()
    finally:
        replies.close()
    return link.exit_code(last_word)


def _rendezvous(join: Join, place: Place, listener: Listener | None) -> Rendezvous | None:
    if join.rendezvous is None:
        return None
    return Rendezvous(
        address=join.rendezvous,
        local_rank=place.local_rank,
        local_size=place.local_size,
        listener=None if listener is None else listener.detach(),
    )


class _EndInAnyCase:
    """A device that stands still in a collective is waited for when the worker leaves, for ever where the ranks that
    it misses are gone. Not every worker has a parent that kills it then."""

    def __init__(self) -> None:
        self._timer = threading.Timer(LEAVE_SECONDS, self._leave)
        self._timer.daemon = True

    def begin(self) -> None:
        self._timer.start()

    def reached(self) -> None:
        self._timer.cancel()

    def _leave(self) -> None:
        logger.error("did not end within %g seconds; leaving", LEAVE_SECONDS)
        sys.stderr.flush()
        os._exit(1)


def serve(
    worker: Worker,
    rank: int,
    receive: Callable[[], list[bytes]],
    replies: WorkerAsyncOutputCopy,
    allow_callables: bool,
) -> Shutdown | None:
    """Until Shutdown, or receive() raises LinkLostError: None. After a step has failed the batch's state is unknown:
    further steps are not run."""
    codec: Codec[WorkerRpc] = Codec(WorkerRpc)
    broken = False
    while True:
        try:
            rpc = codec.decode(receive())
        except LinkLostError as error:
            replies.put(failure(rank, error))
            return None
        except CodecError as error:
            logger.error("dropped a message: %s", error)
            continue
        if isinstance(rpc, Shutdown):
            return rpc
        if isinstance(rpc, Call):
            if rpc.method == "stop_profile":  # the engine may have a step's tokens before its push is recorded
                replies.flush()
            replies.put(_answer(worker, rank, rpc, allow_callables))
        elif not broken:
            try:
                if isinstance(rpc, ExecuteModel):
                    worker.execute_model(rpc.plan)
                else:
                    replies.put(worker.sample_tokens(rpc.step_id, rpc.grammar))
            except Exception as error:
                broken = True
                replies.put(failure(rank, error))


def make_worker(worker_class: str, config: ResolvedConfig, rank: int, rendezvous: Rendezvous | None = None) -> Worker:
    module, _, name = worker_class.partition(":")
    return getattr(import_module(module), name)(config, rank, rendezvous)


def call_worker(worker: Worker, method: str, args: list[Any], function: bytes | None) -> Any:
    """function: a cloudpickled callable(worker, *args), run instead of `method`."""
    if function is None:
        return getattr(worker, method)(*args)
    return unpack_callable(function)(worker, *args)


def _answer(worker: Worker, rank: int, call: Call, allow_callables: bool) -> CallReply | Failure:
    try:
        if call.function is not None and not allow_callables:
            raise ConfigError(
                "collective_rpc with a callable needs an ipc:// link or one with a key; name a method instead"
            )
        value = call_worker(worker, call.method, call.args, call.function)
        require_plain(value, f"the result of {call.method}")
        return CallReply(call.call_id, rank, value)
    except Exception as error:
        return failure(rank, error, call.call_id)


class _ReplyLink:
    """The PUSH socket to the executor. One thread opens and closes it; another one may send while it lives."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._has_failed = False
        self._rank, self._stands_alone, self._longest = -1, False, sys.maxsize
        self.socket = open_socket(context, zmq.PUSH, REPLY_LINGER_MS)
        self._codec: Codec[WorkerReply] = Codec(WorkerReply)

    def open(self, start: Start, address: str, key: LinkKey | None) -> None:
        """A worker that is not the executor's child stands alone: whoever started it sees no more of its failures than
        standard error."""
        self._rank = start.rank
        self._stands_alone = start.health is not None
        self._longest = start.longest_reply or sys.maxsize
        if self._stands_alone:
            self.socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        if key is not None:
            key.present(self.socket)
        connect(self.socket, address)

    def send(self, reply: WorkerReply) -> None:
        if isinstance(reply, Failure) and reply.call_id is None:
            told = reply.message if reply.user_error or reply.lost_peer else reply.traceback.rstrip()
            if self._stands_alone and told and not self._has_failed:  # the others follow from the first
                logger.error("%s", told)
            self._has_failed = True
        try:
            frames = self._codec.encode(reply)
            if isinstance(reply, CallReply) and len(frames[0]) > self._longest:
                raise ValueError(f"the result has {len(frames[0])} bytes, and at most {self._longest} are taken")
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # too long, or a bug of ours
            call_id = reply.call_id if isinstance(reply, CallReply) else None
            return self.send(failure(self._rank, error, call_id))
        self.socket.send_multipart(frames)

    def exit_code(self, last_word: Shutdown | None) -> int:
        """After all has been sent. last_word: the engine's, None if its link was lost."""
        fails_with_engine = last_word is not None and last_word.is_failure and not self._has_failed
        if fails_with_engine and self._stands_alone:
            logger.error("%s", ENGINE_HAS_FAILED)
        return int(self._has_failed or fails_with_engine)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close()
