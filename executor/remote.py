"""Workers in processes of their own: plans go out ROUTER → DEALER, replies come back PUSH → PULL.

No thread reads the replies. Whoever waits for a future polls the PULL socket together with the workers' sentinels, so
a worker that dies or raises is seen at once, whatever was waited for.

Subclasses differ in who starts the worker processes, and how their end is seen.
"""

from __future__ import annotations

import errno
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from ..config import ResolvedConfig
from ..errors import ConfigError, LinkLostError, WorkerError
from ..worker.callables import pack_callable
from ..worker.codec import Codec, CodecError, require_plain
from ..worker.handshake import Hello, Join
from ..worker.logs import Complaints
from ..worker.messages import (
    Call,
    CallReply,
    ExecuteModel,
    Failure,
    GrammarMasks,
    Ready,
    SampleTokens,
    Shutdown,
    StepOutput,
    StepPlan,
    StepReply,
    WorkerInfo,
    WorkerReply,
    WorkerRpc,
)
from ..worker.process import WORKER_CLASS
from ..worker.sockets import SIGNAL_CHECK_MS, open_socket, take
from .base import Executor, Future
from .liveness import Monitor
from .registration import Addresses, Registration

logger = logging.getLogger(__name__)

SHUTDOWN_GRACE = 3.0
"""Seconds that workers get to leave by themselves."""

_CAUSE_SECONDS = 2.0
"""How long after a rank has said that it lost another one, or could not be reached, the reason may still show."""

_LAST_WORDS_MS = 300
"""How long after a worker's death its own account of it may still arrive."""

_MOST_LAST_WORDS_S = 2.0
"""How long the other ranks may go on talking meanwhile."""

_MOST_REPLIES = 1000


class RemoteExecutor(Executor):
    """worker_class: "package.module:Class", with the methods of `worker.Worker`."""

    def __init__(self, config: ResolvedConfig, worker_class: str = WORKER_CLASS) -> None:
        super().__init__(config)
        self._world_size = config.settings.world_size
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._plans = open_socket(self._context, zmq.ROUTER)
        self._plans.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what reaches nobody is an error, not dropped
        self._replies = open_socket(self._context, zmq.PULL)
        self._rpc_codec: Codec[WorkerRpc | Join] = Codec(WorkerRpc | Join)
        self._reply_codec: Codec[WorkerReply] = Codec(WorkerReply)
        self._complaints = Complaints(logger)
        self._sentinels: dict[int, int] = {}
        self._monitor: Monitor | None = None
        self._poller = zmq.Poller()
        self._infos: dict[int, WorkerInfo] = {}
        self._step_id = -1
        self._awaited: set[int] = set()
        self._outputs: dict[int, StepOutput] = {}
        self._call_id = 0
        self._call_values: dict[int, Any] = {}
        self._call_failure: Exception | None = None
        self._failure: Exception | None = None
        self._symptom: tuple[Exception, float] | None = None
        self._bereft: set[int] = set()
        self._closed = False
        self._registration: Registration | None = None
        try:
            self._gather(worker_class)
        except BaseException:
            self.has_failed = True
            self.shutdown()
            raise

    # ---- who starts the workers -----------------------------------------------------------------

    @abstractmethod
    def _bind(self) -> Addresses:
        """Binds the sockets."""

    @abstractmethod
    def _start_workers(self, address: str) -> None:
        """Starts them, or gets them started. Each is to connect to `address`."""

    def _welcome(self, hello: Hello) -> None:
        """A worker has come: called once for each rank."""

    def _wait_longer(self) -> None:
        """Called every second while workers have not come yet."""

    def _check_links(self) -> None:
        """Called every second while something is waited for. A worker whose link is lost may never answer."""

    @abstractmethod
    def _rendezvous(self) -> str:
        """Every worker has come; there are several. Where they find each other, as torch.distributed's init_method."""

    def _all_ready(self) -> None:
        """Every worker has loaded its part of the model and holds both links."""

    @abstractmethod
    def _exit_reason(self, rank: int) -> str:
        """Of a worker whose sentinel has become readable: "was killed by SIGKILL", for a message."""

    @abstractmethod
    def _end_workers(self, grace: float) -> None:
        """They have been told to leave and get `grace` seconds. Closes the sentinels."""

    def _allows_callables(self) -> bool:
        """Whether nobody but our workers can be at the other end."""
        return True

    # ---- what the engine core calls -------------------------------------------------------------

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
        self._awaited.add(self._step_id)
        return _StepFuture(self, self._step_id)

    def collective_rpc(
        self, method: str | bytes | Callable[..., Any], args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        require_plain(list(args), "an argument of collective_rpc")
        name, function = _name_and_bytes(method)
        if function is not None and not self._allows_callables():
            raise ConfigError("collective_rpc with a callable needs ipc:// or a key_file; name a method instead")
        self._call_id += 1
        self._call_values, self._call_failure = {}, None
        self._send(Call(self._call_id, name, list(args), function))
        if not self._wait(lambda: len(self._call_values) == self._world_size or self._call_failure, timeout):
            silent = sorted(set(range(self._world_size)) - self._call_values.keys())
            raise TimeoutError(f"collective_rpc({name}): no reply from ranks {silent} within {timeout:g} seconds")
        if self._call_failure is not None:
            raise self._call_failure
        return [self._call_values[rank] for rank in range(self._world_size)]

    def check_health(self) -> None:
        self._receive()
        self._raise_failure()

    def watch(self, on_failure: Callable[[], None]) -> None:
        self._monitor = Monitor(list(self._sentinels), on_failure)

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        workers_fail = self._failure is not None or self._symptom is not None
        grace = SHUTDOWN_GRACE if self._infos and not workers_fail else 0.0
        self._failure = self._failure or WorkerError(0, "has been shut down")
        if self._monitor is not None:
            self._monitor.stop()
        self._tell_all(Shutdown(is_failure=workers_fail or self.has_failed))
        self._end_workers(grace)
        self._context.destroy(linger=0)

    def step_result(self, step_id: int) -> StepOutput:
        """Waits. Raises: WorkerError."""
        timeout = self.config.settings.step_timeout
        if not self._wait(lambda: step_id in self._outputs, timeout, self.on_wait):
            self._failure = WorkerError(0, f"hung: step {step_id} did not end within {timeout:g} seconds")
            raise self._failure
        self._awaited.discard(step_id)
        return self._outputs.pop(step_id)

    def step_done(self, step_id: int) -> bool:
        self._receive()
        return step_id in self._outputs or self._failure is not None

    def _gather(self, worker_class: str) -> None:
        addresses = self._bind()
        registration = Registration(self.config, worker_class, addresses)
        self._registration = registration
        for waited_for in (self._plans, self._replies):
            self._poller.register(waited_for, zmq.POLLIN)
        self._start_workers(addresses.plans)
        if not self._wait(lambda: registration.is_complete, self.config.settings.join_timeout, self._wait_longer):
            raise registration.overdue()
        registration.close()
        self._tell_all(Join(self._rendezvous() if self._world_size > 1 else None))
        self._wait(lambda: len(self._infos) == self._world_size)
        self._all_ready()

    def _watch_sentinel(self, sentinel: int, rank: int) -> None:
        self._sentinels[sentinel] = rank
        self._poller.register(sentinel, zmq.POLLIN)

    def _send(self, rpc: WorkerRpc) -> None:
        self._raise_failure()
        self._tell_all(rpc)

    def _tell_all(self, message: WorkerRpc | Join) -> None:
        """Encodes it once."""
        if self._registration is not None:
            self._send_to_all(self._rpc_codec.encode(message))

    def _send_to_all(self, frames: list[bytes]) -> None:
        """Those that can be reached. That a rank cannot is believed if nothing says more about it."""
        assert self._registration is not None
        for rank, route in self._registration.routes.items():
            if not self._reach(route, frames):
                error = WorkerError(rank, LinkLostError.MESSAGE)
                self._symptom = self._symptom or (error, time.monotonic() + _CAUSE_SECONDS)

    def _reach(self, route: bytes, frames: list[bytes]) -> bool:
        """Whether somebody is there, and reads."""
        try:
            self._plans.send_multipart([route, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return False
        return True

    def _wait(
        self, arrived: Callable[[], Any], timeout: float | None = None, on_wait: Callable[[], None] = lambda: None
    ) -> bool:
        """timeout: seconds, after which the result is False. Raises: WorkerError, ConfigError."""
        checked = time.monotonic()
        deadline = None if timeout is None else checked + timeout
        self._receive()
        while not arrived():
            self._raise_failure()
            on_wait()
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            if time.monotonic() > checked + SIGNAL_CHECK_MS / 1000:
                checked = time.monotonic()
                self._check_links()
            self._receive(SIGNAL_CHECK_MS if remaining is None else min(SIGNAL_CHECK_MS, int(remaining * 1000 + 0.999)))
        return True

    def _receive(self, timeout_ms: int = 0) -> None:
        """Takes the replies that are here, after waiting for one, or for a worker's end, for `timeout_ms` at most."""
        taken = 0 if self._closed else self._take_replies()
        if self._closed or 0 < taken < _MOST_REPLIES:
            return
        events = dict(self._poller.poll(0 if taken else timeout_ms))
        if events.pop(self._plans, 0):
            self._take_greeting()
        if events.pop(self._replies, 0) and not taken:
            self._take_replies()
        elif events and self._failure is None:
            self._bury([sentinel for sentinel in self._sentinels if sentinel in events])

    def _take_greeting(self) -> None:
        """One: whoever floods us with them holds up nobody else."""
        message = take(self._plans)
        if message is None:
            return
        assert self._registration is not None
        route, *frames = message
        try:
            hello, answer = self._registration.answer(route, frames)
        except WorkerError as error:
            self._failure = self._failure or error
            return
        if answer is not None:
            self._reach(route, answer)  # one that is gone already greets again, or its end is seen
        if hello is not None:
            self._welcome(hello)

    def _take_replies(self) -> int:
        """Returns: how many, _MOST_REPLIES at most: whoever floods us with them does not hide what else happens."""
        taken = 0
        while taken < _MOST_REPLIES and (frames := take(self._replies)) is not None:
            taken += 1
            try:
                self._take(self._reply_codec.decode(frames))
            except CodecError as error:
                self._complaints.log(f"dropped a message: {error}", "no message")
        return taken

    def _take(self, reply: WorkerReply) -> None:
        if isinstance(reply, StepReply):
            if reply.output.step_id in self._awaited:
                self._outputs[reply.output.step_id] = reply.output
            else:
                self._complaints.log("dropped the result of a step that nobody waits for")
        elif isinstance(reply, Ready):
            self._take_ready(reply.info)
        elif not 0 <= reply.rank < self._world_size:
            self._complaints.log(f"dropped a reply of rank {reply.rank}: there is no such rank", "no rank")
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

    def _take_ready(self, info: WorkerInfo) -> None:
        if self._registration is not None and info.rank in self._registration.routes:
            self._infos.setdefault(info.rank, info)
        else:
            self._complaints.log(f"dropped a reply of rank {info.rank}: it has not come", "not come")

    def _bury(self, sentinels: list[int]) -> None:
        """Last words, if they still arrive, say more than an exit code; and a rank that went because it had lost
        another one says less than that one."""
        deadline = time.monotonic() + _MOST_LAST_WORDS_S
        while self._failure is None and time.monotonic() < deadline and self._replies.poll(_LAST_WORDS_MS):
            self._take_replies()
        for sentinel in sentinels:
            self._poller.unregister(sentinel)
        ranks = [self._sentinels[sentinel] for sentinel in sentinels]
        rank = next((rank for rank in ranks if rank not in self._bereft), -1)
        if rank >= 0 and self._failure is None:
            self._failure = WorkerError(rank, self._exit_reason(rank))

    def _raise_failure(self) -> None:
        if self._failure is None and self._symptom and time.monotonic() > self._symptom[1]:
            self._failure = self._symptom[0]
        if self._failure is not None:
            raise self._failure


class _Launched:
    """The future of a forward pass. The worker does not answer a launch, so only a failure can be told."""

    def __init__(self, executor: RemoteExecutor) -> None:
        self._executor = executor

    def result(self) -> None:
        self._executor.check_health()

    def done(self) -> bool:
        return True


class _StepFuture:
    def __init__(self, executor: RemoteExecutor, step_id: int) -> None:
        self._executor = executor
        self._step_id = step_id
        self._output: StepOutput | None = None

    def result(self) -> StepOutput:
        if self._output is None:
            self._output = self._executor.step_result(self._step_id)
        return self._output

    def done(self) -> bool:
        return self._output is not None or self._executor.step_done(self._step_id)


def _name_and_bytes(method: str | bytes | Callable[..., Any]) -> tuple[str, bytes | None]:
    if isinstance(method, str):
        return method, None
    if isinstance(method, bytes):
        return "a callable", method
    return getattr(method, "__qualname__", repr(method)), pack_callable(method)


def _to_error(failure: Failure) -> Exception:
    if failure.user_error:
        return ConfigError(failure.message)
    return WorkerError(failure.rank, failure.message, failure.traceback)
