"""One worker process per device: plans go out ROUTER → DEALER, replies come back PUSH → PULL.

No thread reads the replies. Whoever waits for a future polls the PULL socket together with the workers' exit
descriptors, so a worker that dies or raises is seen at once, whatever was waited for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from ..config import ResolvedConfig
from ..errors import ConfigError, WorkerError
from ..worker.child_process import ChildProcess, stop_all, wait_readable
from ..worker.codec import Codec, CodecError, require_plain
from ..worker.messages import (
    Call,
    CallReply,
    ExecuteModel,
    Failure,
    GrammarMasks,
    Ready,
    Rendezvous,
    SampleTokens,
    Shutdown,
    StepOutput,
    StepPlan,
    StepReply,
    WorkerInfo,
    WorkerReply,
    WorkerRpc,
)
from ..worker.process import WORKER_CLASS, WorkerStart, identity
from ..worker.sockets import SIGNAL_CHECK_MS, SocketDirectory, open_socket
from .base import Executor, Future

logger = logging.getLogger(__name__)

WORKER_MAIN = "stepahead.worker.process:main"

SHUTDOWN_GRACE = 3.0
"""Seconds that workers get to leave by themselves."""

_CAUSE_SECONDS = 2.0
"""How long after a rank has said that it lost another one the reason for that may still show."""

_LAST_WORDS_MS = 300
"""How long after a worker's death its own account of it may still arrive."""


class MultiprocExecutor(Executor):
    """worker_class: "package.module:Class", with the methods of `worker.Worker`."""

    def __init__(self, config: ResolvedConfig, worker_class: str = WORKER_CLASS) -> None:
        super().__init__(config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._plans = open_socket(self._context, zmq.ROUTER)
        self._replies = open_socket(self._context, zmq.PULL)
        self._directory = SocketDirectory()
        self._rpc_codec: Codec[WorkerRpc] = Codec(WorkerRpc)
        self._reply_codec: Codec[WorkerReply] = Codec(WorkerReply)
        self._workers: list[ChildProcess] = []
        self._monitor: _Monitor | None = None
        self._poller = zmq.Poller()
        self._greeted: set[bytes] = set()
        self._infos: dict[int, WorkerInfo] = {}
        self._step_id = -1
        self._outputs: dict[int, StepOutput] = {}
        self._call_id = 0
        self._call_values: dict[int, Any] = {}
        self._call_failure: Exception | None = None
        self._failure: Exception | None = None
        self._symptom: tuple[Exception, float] | None = None
        self._bereft: set[int] = set()
        self._closed = False
        try:
            self._start(worker_class)
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def worker_infos(self) -> Sequence[WorkerInfo]:
        return [self._infos[rank] for rank in sorted(self._infos)]

    def initialize_cache(self, num_blocks: int, max_model_len: int) -> None:
        self.collective_rpc("initialize_cache", [num_blocks, max_model_len])

    def execute_model(self, plan: StepPlan) -> Future[None]:
        self._step_id = plan.step_id
        self._send(ExecuteModel(plan))
        return _Launched(self)

    def sample_tokens(self, grammar: GrammarMasks | None) -> Future[StepOutput]:
        self._send(SampleTokens(self._step_id, grammar))
        return _StepFuture(self, self._step_id)

    def collective_rpc(
        self, method: str | bytes | Callable[..., Any], args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        require_plain(list(args), "an argument of collective_rpc")
        name, function = _pack_callable(method)
        self._call_id += 1
        self._call_values, self._call_failure = {}, None
        self._send(Call(self._call_id, name, list(args), function))
        if not self._wait(lambda: len(self._call_values) == len(self._workers) or self._call_failure, timeout):
            silent = sorted(set(range(len(self._workers))) - self._call_values.keys())
            raise TimeoutError(f"collective_rpc({name}): no reply from ranks {silent} within {timeout:g} seconds")
        if self._call_failure is not None:
            raise self._call_failure
        return [self._call_values[rank] for rank in range(len(self._workers))]

    def check_health(self) -> None:
        self._receive()
        self._raise_failure()

    def watch(self, on_failure: Callable[[], None]) -> None:
        self._monitor = _Monitor([worker.sentinel for worker in self._workers], on_failure)

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        grace = SHUTDOWN_GRACE if self._infos and self._failure is None and not self._symptom else 0.0
        self._failure = self._failure or WorkerError(0, "has been shut down")
        if self._monitor is not None:
            self._monitor.stop()
        for rank in range(len(self._workers)):
            self._plans.send_multipart([identity(rank), *self._rpc_codec.encode(Shutdown())])
        stop_all(self._workers, grace)
        self._context.destroy(linger=0)
        self._directory.remove()

    def step_result(self, step_id: int) -> StepOutput:
        """Waits. Raises: WorkerError."""
        timeout = self.config.settings.step_timeout
        if not self._wait(lambda: step_id in self._outputs, timeout, self.on_wait):
            self._failure = WorkerError(0, f"hung: step {step_id} did not end within {timeout:g} seconds")
            raise self._failure
        return self._outputs.pop(step_id)

    def step_done(self, step_id: int) -> bool:
        self._receive()
        return step_id in self._outputs or self._failure is not None

    def _start(self, worker_class: str) -> None:
        plans, replies = self._directory.address("plans"), self._directory.address("replies")
        self._plans.bind(plans)
        self._replies.bind(replies)
        world_size = self.config.settings.world_size
        for rank in range(world_size):
            address = f"file://{self._directory.path}/ranks"
            rendezvous = Rendezvous(address=address, local_rank=rank, local_size=world_size)
            start = WorkerStart(
                config=self.config,
                rank=rank,
                worker_class=worker_class,
                plans=plans,
                replies=replies,
                rendezvous=rendezvous if world_size > 1 else None,
            )
            message = msgspec.msgpack.encode(start)
            self._workers.append(ChildProcess(WORKER_MAIN, f"stepahead-worker-{rank}", message, self._directory))
        for waited_for in (self._plans, self._replies, *(worker.sentinel for worker in self._workers)):
            self._poller.register(waited_for, zmq.POLLIN)
        # Only once a worker's greeting is here can the ROUTER address it.
        self._wait(lambda: len(self._infos) == len(self._greeted) == len(self._workers))
        self._directory.remove()

    def _send(self, rpc: WorkerRpc) -> None:
        self._raise_failure()
        frames = self._rpc_codec.encode(rpc)
        for rank in range(len(self._workers)):
            self._plans.send_multipart([identity(rank), *frames])

    def _wait(
        self, arrived: Callable[[], Any], timeout: float | None = None, on_wait: Callable[[], None] = lambda: None
    ) -> bool:
        """timeout: seconds, after which the result is False. Raises: WorkerError, ConfigError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._receive()
        while not arrived():
            self._raise_failure()
            on_wait()
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            self._receive(SIGNAL_CHECK_MS if remaining is None else min(SIGNAL_CHECK_MS, int(remaining * 1000 + 0.999)))
        return True

    def _receive(self, timeout_ms: int = 0) -> None:
        """Takes every reply that is here, after waiting for one, or for a worker's end, for `timeout_ms` at most."""
        if self._closed or self._take_replies():
            return
        events = dict(self._poller.poll(timeout_ms))
        if events.pop(self._plans, 0):
            self._greeted.add(self._plans.recv_multipart()[0])
        if events.pop(self._replies, 0):
            self._take_replies()
        elif events and self._failure is None:
            self._bury([rank for rank, worker in enumerate(self._workers) if worker.sentinel in events])

    def _take_replies(self) -> bool:
        taken = False
        while self._replies.poll(0):
            taken = True
            try:
                self._take(self._reply_codec.decode(self._replies.recv_multipart()))
            except CodecError as error:
                logger.error("dropped a message: %s", error)
        return taken

    def _take(self, reply: WorkerReply) -> None:
        if isinstance(reply, StepReply):
            self._outputs[reply.output.step_id] = reply.output
        elif isinstance(reply, Ready):
            self._infos[reply.info.rank] = reply.info
        elif isinstance(reply, CallReply):
            if reply.call_id == self._call_id:
                self._call_values[reply.rank] = reply.value
        elif reply.lost_peer:
            self._bereft.add(reply.rank)
            self._symptom = self._symptom or (_to_error(reply), time.monotonic() + _CAUSE_SECONDS)
        elif reply.call_id is None:
            self._failure = self._failure or _to_error(reply)
        elif reply.call_id == self._call_id:
            self._call_failure = self._call_failure or _to_error(reply)

    def _bury(self, ranks: list[int]) -> None:
        """Last words, if they still arrive, say more than an exit code; and a rank that went because it had lost
        another one says less than that one."""
        while self._failure is None and self._replies.poll(_LAST_WORDS_MS):
            self._take_replies()
        for rank in ranks:
            self._poller.unregister(self._workers[rank].sentinel)
        rank = next((rank for rank in ranks if rank not in self._bereft), -1)
        if rank < 0:
            return
        worker = self._workers[rank]
        worker.wait()
        self._failure = self._failure or WorkerError(rank, f"{worker.exit_reason()}; see its error output above")

    def _raise_failure(self) -> None:
        if self._failure is None and self._symptom and time.monotonic() > self._symptom[1]:
            self._failure = self._symptom[0]
        if self._failure is not None:
            raise self._failure


class _Launched:
    """The future of a forward pass. The worker does not answer a launch, so only a failure can be told."""

    def __init__(self, executor: MultiprocExecutor) -> None:
        self._executor = executor

    def result(self) -> None:
        self._executor.check_health()

    def done(self) -> bool:
        return True


class _StepFuture:
    def __init__(self, executor: MultiprocExecutor, step_id: int) -> None:
        self._executor = executor
        self._step_id = step_id
        self._output: StepOutput | None = None

    def result(self) -> StepOutput:
        if self._output is None:
            self._output = self._executor.step_result(self._step_id)
        return self._output

    def done(self) -> bool:
        return self._output is not None or self._executor.step_done(self._step_id)


class _Monitor:
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


def _pack_callable(method: str | bytes | Callable[..., Any]) -> tuple[str, bytes | None]:
    if isinstance(method, str):
        return method, None
    if isinstance(method, bytes):
        return "a callable", method
    import cloudpickle

    return getattr(method, "__qualname__", repr(method)), cloudpickle.dumps(method)


def _to_error(failure: Failure) -> Exception:
    if failure.user_error:
        return ConfigError(failure.message)
    return WorkerError(failure.rank, failure.message, failure.traceback)
