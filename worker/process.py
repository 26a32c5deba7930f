"""A worker process: receives the engine's RPCs in order, hands them to the Worker, never waits for the device.

Replies leave through the WorkerAsyncOutputCopy thread alone, so results, call replies and failures share one
socket and one order. torch is imported inside `main`, after there is a way to report that it failed.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from ..config import ResolvedConfig
from ..errors import ConfigError
from .codec import Codec, CodecError, require_plain
from .failure import failure
from .logs import log_to_stderr, phase
from .messages import Call, CallReply, ExecuteModel, Failure, Ready, Rendezvous, Shutdown, WorkerReply, WorkerRpc
from .sockets import open_socket

if TYPE_CHECKING:
    from .async_output import WorkerAsyncOutputCopy
    from .worker import Worker

logger = logging.getLogger(__name__)

WORKER_CLASS = "stepahead.worker.worker:Worker"

REPLY_LINGER_MS = 2000
"""How long a worker that exits waits for its last reply to be taken."""


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor tells a new worker process.

    rank: stage * tensor_parallel_size + rank within the stage. worker_class: "package.module:Class".
    plans, replies: addresses that the executor has bound. rendezvous: None for the only rank.
    """

    config: ResolvedConfig
    rank: int
    worker_class: str
    plans: str
    replies: str
    rendezvous: Rendezvous | None = None


def main(message: bytes) -> int:
    start = msgspec.msgpack.decode(message, type=WorkerStart)
    log_to_stderr(f"worker {start.rank}", start.config.settings.log_level)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plans = open_socket(context, zmq.DEALER)
    plans.setsockopt(zmq.IDENTITY, identity(start.rank))
    plans.connect(start.plans)
    plans.send(b"")  # tells the executor's ROUTER who we are: it can address us from now on
    try:
        return _run(start, plans, _ReplyLink(context, start.replies, start.rank))
    finally:
        plans.close()
        context.destroy(linger=REPLY_LINGER_MS)


def identity(rank: int) -> bytes:
    """Of a rank's DEALER socket."""
    return b"rank-%d" % rank


def _run(start: WorkerStart, plans: zmq.Socket[bytes], link: _ReplyLink) -> int:
    try:
        from .async_output import WorkerAsyncOutputCopy

        with phase(logger, "importing torch"):
            import torch  # noqa: F401

        worker = make_worker(start.worker_class, start.config, start.rank, start.rendezvous)
        ready = Ready(worker.info())
    except Exception as error:
        link.open()
        link.send(failure(start.rank, error))
        link.close()
        return 1
    replies = WorkerAsyncOutputCopy(
        link.send,
        start.rank,
        on_start=link.open,
        on_stop=link.close,
        lane=worker.copy_lane,
        tells_tokens=start.rank == start.config.settings.output_rank,
    )
    replies.start()
    try:
        replies.put(ready)
        serve(worker, start.rank, plans, replies, allow_callables=start.plans.startswith("ipc://"))
        worker.shutdown()
    finally:
        replies.close()
    return 0


def serve(
    worker: Worker, rank: int, plans: zmq.Socket[bytes], replies: WorkerAsyncOutputCopy, allow_callables: bool
) -> None:
    """Until Shutdown. After a step has failed the batch's state is unknown: further steps are not run."""
    codec: Codec[WorkerRpc] = Codec(WorkerRpc)
    broken = False
    while True:
        try:
            rpc = codec.decode(plans.recv_multipart())
        except CodecError as error:
            logger.error("dropped a message: %s", error)
            continue
        if isinstance(rpc, Shutdown):
            return
        if isinstance(rpc, Call):
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
    import cloudpickle

    return cloudpickle.loads(function)(worker, *args)


def _answer(worker: Worker, rank: int, call: Call, allow_callables: bool) -> CallReply | Failure:
    try:
        if call.function is not None and not allow_callables:
            raise ConfigError(
                "collective_rpc with a callable needs an ipc:// link; name a method of the worker instead"
            )
        value = call_worker(worker, call.method, call.args, call.function)
        require_plain(value, f"the result of {call.method}")
        return CallReply(call.call_id, rank, value)
    except Exception as error:
        return failure(rank, error, call.call_id)


class _ReplyLink:
    """The PUSH socket to the executor. Opened, used and closed by one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, rank: int) -> None:
        self._context = context
        self._address = address
        self._rank = rank
        self._codec: Codec[WorkerReply] = Codec(WorkerReply)

    def open(self) -> None:
        self._socket = open_socket(self._context, zmq.PUSH, REPLY_LINGER_MS)
        self._socket.connect(self._address)

    def send(self, reply: WorkerReply) -> None:
        try:
            frames = self._codec.encode(reply)
        except TypeError as error:  # an array of a kind that does not travel: a bug of ours, but no silence
            frames = self._codec.encode(failure(self._rank, error))
        self._socket.send_multipart(frames)

    def close(self) -> None:
        self._socket.close()
