"""The engine-core process: I/O threads turn frames into messages, the busy loop steps the engine.

    input thread   owns the PULL socket: frames → inbox
    main thread    the busy loop: inbox → EngineCore.step → outbox; blocks on the inbox while the engine is idle
    output thread  owns the PUSH socket: outbox → frames

With the mp executor this process never imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from ..config import ResolvedConfig
from ..errors import ConfigError, StepaheadError, WorkerError
from ..executor.registry import executor_class
from ..worker.codec import Codec, CodecError, require_plain
from ..worker.failure import text_of, traceback_of
from ..worker.logs import log_to_stderr, phase
from ..worker.sockets import SIGNAL_CHECK_MS, open_socket, remove_all_directories
from .messages import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    EngineFailed,
    EngineMessage,
    OutputBatch,
    StartFailure,
    Stop,
    UtilityCall,
    UtilityReply,
)

if TYPE_CHECKING:
    from .engine import EngineCore

logger = logging.getLogger(__name__)

OUTPUT_LINGER_MS = 2000
"""How long the process, when it ends, waits for its last message to be taken."""


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    """What the client tells a new engine-core process.

    inputs, outputs: addresses that the client has bound.
    """

    config: ResolvedConfig
    inputs: str
    outputs: str


class Terminated(SystemExit):
    """SIGTERM arrived."""


def main(message: bytes) -> int:
    start = msgspec.msgpack.decode(message, type=EngineStart)
    log_to_stderr("engine core", start.config.settings.log_level)
    try:
        signal.signal(signal.SIGTERM, _raise_terminated)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the client started us without it
        links = _Links(start.inputs, start.outputs)
        try:
            return _serve(start, links)
        finally:
            links.close()
    except Terminated:  # before or after there was anything to end
        return 128 + signal.SIGTERM
    finally:
        remove_all_directories()  # one SIGTERM may have killed the client too, and we end before we notice


def _serve(start: EngineStart, links: _Links) -> int:
    """Until Stop, SIGTERM or a failure. Returns the exit code."""
    engine: EngineCore | None = None
    try:
        engine = _start_engine(start.config)
        executor = engine.executor
        executor.watch(lambda: links.inbox.put(executor.check_health))
        links.receive_into(engine)
        links.outbox.put(engine.info)
        run_busy_loop(engine, links.inbox, links.outbox.put)
        return 0
    except (Exception, Terminated) as error:
        if engine is None:
            user_error = isinstance(error, ConfigError)
            links.outbox.put(StartFailure(message=_message(error), traceback=_traceback(error), user_error=user_error))
        else:
            links.outbox.put(EngineFailed(_message(error), _traceback(error)))
            engine.executor.has_failed = True
        return 128 + signal.SIGTERM if isinstance(error, Terminated) else 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # already on the way out
        if engine is not None:
            engine.shutdown()


def _start_engine(config: ResolvedConfig) -> EngineCore:
    from .engine import EngineCore

    with phase(logger, "starting the workers"):
        executor = executor_class(config.settings.executor)(config)
    try:
        with phase(logger, "preparing the workers for the first step"):
            return EngineCore(config, executor)
    except BaseException:
        executor.has_failed = True
        executor.shutdown()
        raise


InboxItem = ClientMessage | Callable[[], None]
"""A message, or something the busy loop is to run between two steps."""


def run_busy_loop(
    engine: EngineCore, inbox: queue.SimpleQueue[InboxItem], send: Callable[[EngineMessage], None]
) -> None:
    """Steps the engine while it has work and sleeps while it has none; returns at Stop.

    Raises: whatever the engine, or a callable in the inbox, raises.
    """
    while True:
        busy = engine.has_work()
        if not busy:
            engine.idle()
        item = None
        with contextlib.suppress(queue.Empty):
            item = inbox.get(block=not busy, timeout=SIGNAL_CHECK_MS / 1000)
        if item is None:  # not inside a handler: the engine's errors have nothing to do with an empty queue
            outputs = engine.step() if busy else None
            if outputs is not None:
                send(outputs)
        elif isinstance(item, AddRequest):
            refusal = engine.add_request(item.request)
            if refusal is not None:
                send(OutputBatch.of_finished([refusal]))
        elif isinstance(item, AbortRequests):
            engine.abort_requests(item.request_ids)
        elif isinstance(item, UtilityCall):
            send(_call_utility(engine, item))
        elif isinstance(item, Stop):
            return
        else:
            item()


def _call_utility(engine: EngineCore, call: UtilityCall) -> UtilityReply:
    try:
        value = engine.utility(call.method, call.args)
        require_plain(value, f"the result of {call.method}")
        return UtilityReply(call.call_id, value)
    except Exception as error:
        engine.executor.check_health()  # a dead worker is everyone's affair, the rest is the caller's
        remote = error.remote_traceback if isinstance(error, WorkerError) else ""
        return UtilityReply(call.call_id, error=f"{_message(error)}\n{remote}".rstrip())


class _Links:
    """The two sockets to the client, each owned by its thread, and the queues behind them."""

    def __init__(self, inputs: str, outputs: str) -> None:
        self.inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[EngineMessage | None] = queue.SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inputs = open_socket(self._context, zmq.PULL)
        # Connected before the outputs: when the client gets the handshake, both links stand.
        self._inputs.connect(inputs)
        self._output_thread = threading.Thread(target=self._send_all, args=(outputs,), name="output", daemon=True)
        self._output_thread.start()
        self._input_thread: threading.Thread | None = None

    def receive_into(self, engine: EngineCore) -> None:
        """Starts the input thread."""
        self._input_thread = threading.Thread(target=self._receive_all, args=(engine,), name="input", daemon=True)
        self._input_thread.start()

    def close(self) -> None:
        """Sends what is in the outbox, for a bounded time."""
        self.outbox.put(None)
        self._output_thread.join()
        if self._input_thread is None:
            self._inputs.close()
        self._context.term()  # ends the input thread's recv

    def _receive_all(self, engine: EngineCore) -> None:
        codec: Codec[ClientMessage] = Codec(ClientMessage)
        while True:
            try:
                message = codec.decode(self._inputs.recv_multipart())
            except CodecError as error:
                logger.error("dropped a message: %s", error)
                continue
            except zmq.ContextTerminated:
                self._inputs.close()
                return
            if isinstance(message, AbortRequests):
                engine.early_aborts.extend(message.request_ids)
            self.inbox.put(message)

    def _send_all(self, address: str) -> None:
        codec: Codec[EngineMessage] = Codec(EngineMessage)
        socket = open_socket(self._context, zmq.PUSH, OUTPUT_LINGER_MS)
        socket.connect(address)
        while (message := self.outbox.get()) is not None:
            try:
                frames = codec.encode(message)
            except Exception as error:  # a bug of ours; the client then ends this process
                frames = codec.encode(EngineFailed(_message(error), _traceback(error)))
            socket.send_multipart(frames)
        socket.close()


def _raise_terminated(_signal: int, _frame: Any) -> None:
    raise Terminated("the engine core was told to terminate (SIGTERM)")


def _message(error: BaseException) -> str:
    """What a person reads first; our own errors already say it all."""
    own = isinstance(error, (StepaheadError, Terminated))
    return text_of(error) if own else f"{type(error).__name__}: {text_of(error)}"


def _traceback(error: BaseException) -> str:
    """The worker's own, if it was the worker: where we noticed says nothing about it."""
    return error.remote_traceback if isinstance(error, WorkerError) else traceback_of(error)
