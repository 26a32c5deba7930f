"""The user's process' end of the engine: starts the engine-core process and exchanges messages with it.

One I/O thread owns both sockets. Senders encode in their own thread, append the frames to a queue, and wake it
through a pipe. The engine lives as long as the client: it ends with close(), with the client object, with the
interpreter, and with this process however that dies.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import os
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from ..config import ResolvedConfig
from ..engine_core.messages import (
    AbortRequests,
    AddRequest,
    ClientMessage,
    EngineFailed,
    EngineInfo,
    EngineMessage,
    OutputBatch,
    StartFailure,
    Stop,
    UtilityCall,
    UtilityReply,
)
from ..engine_core.process import EngineStart
from ..engine_core.stats import EngineStats
from ..errors import ConfigError, EngineDeadError, StepaheadError
from ..worker.callables import pack_callable
from ..worker.child_process import TERM_PATIENCE, ChildProcess, stop_all
from ..worker.codec import Codec, CodecError, require_plain
from ..worker.sockets import SIGNAL_CHECK_MS, SocketDirectory, open_socket

logger = logging.getLogger(__name__)

ENGINE_MAIN = "stepahead.engine_core.process:main"

STOP_GRACE = 5.0
"""Seconds the engine core gets to end by itself before it is made to."""

_INTERRUPTED_PATIENCE = 0.5
"""Seconds it gets when the user interrupts its start: a worker in the middle of loading hears nothing for long."""

_MESSAGES_A_TURN = 64
"""Taken before senders get their turn, so that a busy engine does not keep an abort waiting."""

_LAST_WORDS_MS = 300
"""How long after the engine core's death its own account of it may still arrive."""


class EngineClient:
    """info: what the engine resolved.

    on_message: called in the I/O thread with each OutputBatch and, if the engine dies before close(), last of all
    with one EngineFailed. It must not hold the client strongly if the client is to end when it is forgotten.
    Construction starts the process and waits until it is ready.
    Raises: ConfigError when a setting or model cannot be used, EngineDeadError when the engine fails to start.
    """

    def __init__(self, config: ResolvedConfig, on_message: Callable[[EngineMessage], None]) -> None:
        self._connection = _Connection(config, on_message)
        self.info = self._connection.info
        self._end = weakref.finalize(self, self._connection.close)

    def send(self, message: AddRequest | AbortRequests) -> None:
        """From any thread. Raises: EngineDeadError; TypeError when the message cannot travel."""
        self._connection.send(message)

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Runs a method of the engine core ("stats", "collective_rpc", …) and waits for its result, from any thread
        but on_message's. args are plain values, or callables (packed by cloudpickle). timeout: seconds.

        Raises: EngineDeadError; StepaheadError when the method raised; TimeoutError; TypeError.
        """
        return self._connection.call(method, args, timeout)

    def stats(self) -> EngineStats:
        """From any thread but on_message's. Raises: EngineDeadError."""
        return msgspec.convert(self.call("stats"), EngineStats)

    def close(self) -> None:
        """Ends the engine core and its workers, within seconds. Safe to call twice and from any thread."""
        self._end()


class _Connection:
    """What outlives the client object until the engine is down. Does not know the client."""

    def __init__(self, config: ResolvedConfig, on_message: Callable[[EngineMessage], None]) -> None:
        self._pid = os.getpid()
        self._on_message = on_message
        self._codec: Codec[ClientMessage] = Codec(ClientMessage)
        self._lock = threading.Lock()  # over the codec, the queue's order, the call table and the fields below
        self._outgoing: collections.deque[list[bytes]] = collections.deque()
        self._calls: dict[int, concurrent.futures.Future[Any]] = {}
        self._next_call = 0
        self._dead: str | None = None
        self._closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inputs = open_socket(self._context, zmq.PUSH)
        self._outputs = open_socket(self._context, zmq.PULL)
        self._decoder: Codec[EngineMessage] = Codec(EngineMessage)
        directory = SocketDirectory.unmade()
        self._process: ChildProcess | None = None
        try:
            self._process = _spawn(directory)
            self._start(self._process, config, directory)
            self.info = self._handshake(self._process)
        except BaseException as error:
            if self._process is not None:
                stop_all([self._process], 0.0, TERM_PATIENCE if isinstance(error, Exception) else _INTERRUPTED_PATIENCE)
            self._context.destroy(linger=0)
            raise
        finally:
            directory.remove()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)
        self._thread = threading.Thread(target=self._run, args=(self._process,), name="engine-io", daemon=True)
        self._thread.start()

    def send(self, message: ClientMessage) -> None:
        self._check_owner()
        with self._lock:
            self._check_alive()
            self._outgoing.append(self._codec.encode(message))
            self._wake()

    def call(self, method: str, args: tuple[Any, ...], timeout: float | None) -> Any:
        if threading.current_thread() is self._thread:
            raise RuntimeError("a call from on_message would wait for itself")
        packed = [pack_callable(value) for value in args]
        require_plain(packed, f"an argument of {method}")
        self._check_owner()
        reply: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            self._check_alive()
            call_id = self._next_call
            self._next_call += 1
            self._calls[call_id] = reply
            self._outgoing.append(self._codec.encode(UtilityCall(call_id, method, packed)))
            self._wake()
        try:
            return reply.result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"the engine has not answered {method} within {timeout:g} seconds") from None
        finally:
            with self._lock:
                self._calls.pop(call_id, None)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked copy: the engine belongs to the process that started it
        with self._lock:
            first, self._closing = not self._closing, True
            if first and self._dead is None:
                self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_GRACE + 10)

    def _check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise EngineDeadError("this engine belongs to the process that this one was forked from")

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if self._closing:
            raise EngineDeadError("the engine has been closed")

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake anyway
            os.write(self._wake_writer, b"\0")

    def _start(self, process: ChildProcess, config: ResolvedConfig, directory: SocketDirectory) -> None:
        start = EngineStart(
            config=config,
            inputs=directory.address("inputs"),
            outputs=directory.address("outputs"),
        )
        directory.make()
        self._inputs.bind(start.inputs)
        self._outputs.bind(start.outputs)
        process.tell(msgspec.msgpack.encode(start))

    def _handshake(self, process: ChildProcess) -> EngineInfo:
        poller = self._poller(process)
        while True:
            events = dict(poller.poll(SIGNAL_CHECK_MS))
            if not events:
                continue
            if self._outputs in events or self._outputs.poll(_LAST_WORDS_MS):
                message = self._receive()
                if isinstance(message, EngineInfo):
                    self._await_link(process)
                    return message
                if isinstance(message, StartFailure):
                    if message.user_error:
                        raise ConfigError(message.message)
                    raise EngineDeadError(
                        f"the engine failed to start: {message.message}\n\n{message.traceback}".rstrip()
                    )
            elif process.wait(0):
                raise EngineDeadError(
                    f"the engine core {process.exit_reason()} while it started; see its error output above"
                )

    def _await_link(self, process: ChildProcess) -> None:
        """Until the engine core's end of our inputs is there too; its death is noticed later."""
        poller = zmq.Poller()
        poller.register(self._inputs, zmq.POLLOUT)
        poller.register(process.sentinel, zmq.POLLIN)
        poller.poll()

    def _run(self, process: ChildProcess) -> None:
        """The I/O thread."""
        failure: EngineFailed | None = None
        try:
            failure = self._exchange(process)
        except Exception as error:
            logger.exception("the engine's I/O thread failed")
            text = "".join(traceback.format_exception(error))
            failure = EngineFailed(f"the engine client failed: {type(error).__name__}: {error}", text)
        dead = "the engine has been closed"
        if failure is not None:
            dead = f"the engine died: {failure.message}\n\n{failure.traceback}".rstrip()
        with self._lock:
            self._dead = dead
            calls = list(self._calls.values())
        for call in calls:
            call.set_exception(EngineDeadError(dead))
        try:
            if failure is not None:
                self._on_message(failure)
        finally:
            with self._lock:
                self._push(self._codec.encode(Stop()))
            stop_all([process], STOP_GRACE)
            self._context.destroy(linger=0)
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _exchange(self, process: ChildProcess) -> EngineFailed | None:
        """Until close() (then None) or the engine's death."""
        poller = self._poller(process)
        poller.register(self._wake_reader, zmq.POLLIN)
        while True:
            events = dict(poller.poll())
            if self._wake_reader in events:
                os.read(self._wake_reader, 4096)
                while self._outgoing:
                    self._push(self._outgoing.popleft())
                if self._closing:
                    return None
            gone = process.sentinel in events
            budget = _MESSAGES_A_TURN
            while (budget or gone) and self._outputs.poll(_LAST_WORDS_MS if gone else 0):
                budget -= 1
                message = self._receive()
                if isinstance(message, EngineFailed):
                    return message
                self._deliver(message)
            if gone:
                process.wait()
                return EngineFailed(f"the engine core {process.exit_reason()}; see its error output above", "")

    def _deliver(self, message: EngineMessage | None) -> None:
        if isinstance(message, OutputBatch):
            self._on_message(message)
        elif isinstance(message, UtilityReply):
            with self._lock:
                reply = self._calls.pop(message.call_id, None)
            if reply is None:
                return  # its caller has stopped waiting
            if message.error:
                reply.set_exception(StepaheadError(message.error))
            else:
                reply.set_result(message.value)

    def _receive(self) -> EngineMessage | None:
        try:
            return self._decoder.decode(self._outputs.recv_multipart())
        except CodecError as error:
            logger.error("dropped a message: %s", error)
            return None

    def _push(self, frames: list[bytes]) -> None:
        """Without a high-water mark only a peer that is gone is not ready to take more; its sentinel tells."""
        with contextlib.suppress(zmq.Again):
            self._inputs.send_multipart(frames, zmq.NOBLOCK)

    def _poller(self, process: ChildProcess) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._outputs, zmq.POLLIN)
        poller.register(process.sentinel, zmq.POLLIN)
        return poller


def _spawn(directory: SocketDirectory) -> ChildProcess:
    """The engine core: deaf to SIGTERM until it handles it, so that one sent to the whole group, which kills a script
    at once, leaves somebody to remove the directory."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return ChildProcess(ENGINE_MAIN, "stepahead-engine-core", None, directory)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
