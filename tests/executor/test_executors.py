"""What every executor owes its engine, and what only the multiprocess one can suffer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import pytest
import zmq

from noisy_engine import RUBBISH
from paper_device import generate_alone, paper_config
from plans import PROMPT, plan
from process_tools import UserScript, alive, nothing_left_behind, wait_until
from stepahead.errors import ConfigError, PeerLostError, WorkerError
from stepahead.executor.base import Executor
from stepahead.executor.registry import executor_class
from stepahead.worker.sockets import SocketDirectory

pytestmark = pytest.mark.timeout(60)

Start = Callable[..., Any]


@pytest.fixture(autouse=True)
def _nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_left_behind(monkeypatch):
        yield


@pytest.fixture
def start(_nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr("stepahead.executor.remote.SHUTDOWN_GRACE", 0.5)
    started: list[Executor] = []

    def start(name: str = "PaperMultiproc", step_ms: float = 0.0, **settings: Any) -> Any:
        config = paper_config(executor=f"paper_worker:{name}", **settings)
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, step_ms=step_ms))
        executor = executor_class(config.settings.executor)(config)
        started.append(executor)
        executor.initialize_cache(executor.worker_infos()[0].kv_blocks, config.max_model_len)
        return executor

    yield start
    for executor in started:
        executor.shutdown()


both = pytest.mark.parametrize("name", ["PaperMultiproc", "PaperUni"])


def step(executor: Executor, step_id: int) -> int:
    executor.execute_model(plan(step_id)).result()
    output = executor.sample_tokens(None).result()
    assert output.step_id == step_id
    return int(output.sampled[0, 0])


# ---- every executor -----------------------------------------------------------------------------


@both
def test_steps_give_the_devices_tokens(start: Start, name: str) -> None:
    executor = start(name)
    assert [step(executor, i) for i in range(6)] == generate_alone(PROMPT, 6, (), 512)


@both
def test_two_steps_in_flight_resolve_in_any_order(start: Start, name: str) -> None:
    executor = start(name, step_ms=30)
    futures = []
    for i in range(3):
        executor.execute_model(plan(i))
        futures.append(executor.sample_tokens(None))
    assert not futures[2].done()
    tokens = [int(future.result().sampled[0, 0]) for future in reversed(futures)]
    assert tokens[::-1] == generate_alone(PROMPT, 3, (), 512)
    assert all(future.done() for future in futures)
    assert futures[0].result() is futures[0].result()


@both
def test_starting_a_step_does_not_wait_for_it(start: Start, name: str) -> None:
    executor = start(name, step_ms=1000)
    begin = time.monotonic()
    executor.execute_model(plan(0))
    future = executor.sample_tokens(None)
    assert not future.done()
    assert time.monotonic() - begin < 0.5
    future.result()
    assert time.monotonic() - begin >= 0.99


@both
def test_a_step_that_takes_too_long_is_called_hung(start: Start, name: str) -> None:
    executor = start(name, step_ms=60_000, step_timeout=0.2)
    executor.execute_model(plan(0))
    with pytest.raises(WorkerError, match=r"hung: step 0 did not end within 0\.2 seconds"):
        executor.sample_tokens(None).result()


@both
def test_the_engine_hears_of_it_while_a_step_does_not_end(
    start: Start, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepahead.executor.remote.SIGNAL_CHECK_MS", 20)
    monkeypatch.setattr("stepahead.executor.uniproc._WAIT_SLICE", 0.02)
    executor = start(name, step_ms=60_000, step_timeout=0.3)
    heard: list[float] = []
    executor.on_wait = lambda: heard.append(time.monotonic())
    executor.execute_model(plan(0))
    with pytest.raises(WorkerError, match="hung"):
        executor.sample_tokens(None).result()
    assert len(heard) > 3


def test_an_exception_whose_text_is_hard_to_send_is_the_callers_and_the_worker_goes_on(start: Start) -> None:
    def no_utf_8(worker: Any) -> None:
        raise ValueError("\udc80 is no name")

    def no_words(worker: Any) -> None:
        class UnspeakableError(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        raise UnspeakableError

    def no_cause(worker: Any) -> None:
        try:
            no_words(worker)
        except Exception as error:
            raise ValueError("x" * (1 << 20)) from error

    def no_peer(worker: Any) -> None:
        raise PeerLostError("so it says")

    executor = start("PaperMultiproc")
    with pytest.raises(WorkerError, match=r"ValueError: x+ … x+$") as caught:
        executor.collective_rpc(no_cause)
    assert len(str(caught.value)) < 1 << 17
    with pytest.raises(WorkerError, match="PeerLostError: so it says"):
        executor.collective_rpc(no_peer)
    with pytest.raises(WorkerError, match=r"ValueError: \\udc80 is no name"):
        executor.collective_rpc(no_utf_8)
    with pytest.raises(WorkerError, match=r"UnspeakableError: \(its message cannot be shown\)"):
        executor.collective_rpc(no_words)
    assert executor.collective_rpc("add", (2, 3)) == [5]


@both
def test_collective_rpc_takes_a_name_a_callable_or_a_pickled_callable(start: Start, name: str) -> None:
    executor = start(name)
    assert executor.collective_rpc("add", (2, 3)) == [5]
    assert executor.collective_rpc(lambda worker, x: (worker.rank, x), ["y"]) == [[0, "y"]]
    assert executor.collective_rpc(cloudpickle.dumps(lambda worker: worker.add(1, 1))) == [2]


@both
def test_what_cannot_travel_is_refused_with_its_type(start: Start, name: str) -> None:
    executor = start(name)
    with pytest.raises(TypeError, match=r"argument of collective_rpc cannot travel.*ndarray"):
        executor.collective_rpc("add", [np.zeros(2), 1])
    with pytest.raises((TypeError, WorkerError), match=r"result of \w+ cannot travel.*ndarray"):
        executor.collective_rpc("array")
    assert executor.collective_rpc("add", [2, 3]) == [5]


@both
def test_a_config_error_from_a_call_stays_one(start: Start, name: str) -> None:
    executor = start(name)
    with pytest.raises(ConfigError) as info:
        executor.collective_rpc("refuse", ["the pool is too small"])
    assert str(info.value) == "the pool is too small"
    executor.check_health()


@both
def test_shutdown_may_be_repeated_and_later_calls_say_so(start: Start, name: str) -> None:
    executor = start(name)
    executor.shutdown()
    executor.shutdown()
    for call in (
        executor.check_health,
        lambda: executor.execute_model(plan(0)),
        lambda: executor.collective_rpc("add"),
    ):
        with pytest.raises(WorkerError, match="has been shut down"):
            call()


@pytest.mark.parametrize("name", ["mp", "uni"])
def test_the_built_in_executors_support_async_scheduling(name: str) -> None:
    assert executor_class(name).supports_async_scheduling()


@pytest.mark.parametrize("name", ["rya", "no.such.module:X", "paper_worker:Nothing", "paper_worker:PaperWorker"])
def test_an_unknown_executor_is_a_config_error_that_names_it(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        executor_class(name)


# ---- worker processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("rpc", ["execute_model", "sample_tokens"])
def test_an_error_of_any_rank_in_a_step_surfaces_at_once_with_its_traceback(start: Start, rpc: str, rank: int) -> None:
    """The other rank's step takes a minute, as if it waited for the failed one in a collective."""
    executor = start(tensor_parallel_size=2)

    def sabotage(worker: Any, rpc: str, rank: int) -> None:
        def fail(*_: object) -> None:
            raise ArithmeticError("out of luck")

        worker.delay = 60
        if worker.rank == rank:
            setattr(worker, rpc, fail)

    executor.collective_rpc(sabotage, [rpc, rank])
    begin = time.monotonic()
    with pytest.raises(WorkerError) as info:
        step(executor, 0)
    assert time.monotonic() - begin < 5
    assert info.value.rank == rank
    assert str(info.value) == f"worker rank {rank}: ArithmeticError: out of luck"
    assert "in fail" in info.value.remote_traceback
    with pytest.raises(WorkerError, match="out of luck"):
        executor.check_health()
    with pytest.raises(WorkerError, match="out of luck"):
        step(executor, 1)


def test_an_error_of_one_rank_in_a_call_does_not_wait_for_the_others(start: Start) -> None:
    executor = start(tensor_parallel_size=2)

    def uneven(worker: Any) -> None:
        if worker.rank == 1:
            raise ArithmeticError("only here")
        time.sleep(1)

    with pytest.raises(WorkerError, match="worker rank 1: ArithmeticError: only here") as info:
        executor.collective_rpc(uneven)
    assert executor._call_values == {}, "it was told before rank 0 had answered"
    assert "in uneven" in info.value.remote_traceback
    assert executor.collective_rpc("add", [1, 1]) == [2, 2], "the late reply belongs to no other call"
    assert step(executor, 0) == generate_alone(PROMPT, 1, (), 512)[0]


def test_a_failed_call_leaves_steps_in_flight_alone(start: Start) -> None:
    executor = start(step_ms=50)
    executor.execute_model(plan(0))
    future = executor.sample_tokens(None)
    with pytest.raises(WorkerError, match="ValueError: not now"):
        executor.collective_rpc("explode", ["not now"])
    assert future.result().sampled.tolist() == [generate_alone(PROMPT, 1, (), 512)]


def test_a_call_that_no_rank_answers_times_out_and_names_the_ranks(start: Start) -> None:
    executor = start(tensor_parallel_size=2)
    with pytest.raises(TimeoutError, match=r"no reply from ranks \[1\] within 0\.3 seconds"):
        executor.collective_rpc(lambda worker: time.sleep(1) if worker.rank else None, timeout=0.3)
    assert executor.collective_rpc("add", [1, 1]) == [2, 2]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_worker_is_named_at_once_whatever_is_waited_for(start: Start, sent: signal.Signals) -> None:
    executor = start(step_ms=60_000, tensor_parallel_size=2)
    executor.execute_model(plan(0))
    future = executor.sample_tokens(None)
    threading.Timer(0.2, os.kill, (executor.worker_infos()[1].pid, sent)).start()
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=f"worker rank 1: was killed by {sent.name}"):
        future.result()
    assert time.monotonic() - begin < 5
    assert future.done()
    with pytest.raises(WorkerError, match=sent.name):
        executor.collective_rpc("add", [1, 1])


def test_an_idle_executor_tells_of_a_dead_worker(start: Start) -> None:
    executor = start()
    told = threading.Event()
    executor.watch(told.set)
    assert not told.wait(0.1)
    os.kill(executor.worker_infos()[0].pid, signal.SIGKILL)
    assert told.wait(5)
    with pytest.raises(WorkerError, match="SIGKILL"):
        executor.check_health()


def test_a_shutdown_is_not_taken_for_a_death(start: Start) -> None:
    executor = start()
    told = threading.Event()
    executor.watch(told.set)
    executor.shutdown()
    assert not told.wait(0.1)


def test_a_worker_that_ignores_shutdown_is_killed(start: Start) -> None:
    executor = start()
    pid = executor.worker_infos()[0].pid
    with pytest.raises(TimeoutError):
        executor.collective_rpc(lambda worker: time.sleep(60), timeout=0.1)
    executor.shutdown()
    assert not alive([pid])


def test_when_one_of_two_workers_cannot_start_the_other_is_ended(start: Start) -> None:
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="this worker cannot start"):
        start("HalfBadMultiproc", tensor_parallel_size=2)
    assert time.monotonic() - begin < 10


def test_frames_that_are_no_message_harm_neither_side(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(SocketDirectory, "remove", lambda self: kept.append(self.path))
        executor = start()
    directory = SocketDirectory(kept[0])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger, impostor = context.socket(zmq.PUSH), context.socket(zmq.DEALER)
    route = executor._registration.routes[0]
    stranger.connect(directory.address("replies"))
    impostor.connect(directory.address("plans"))
    for rubbish in RUBBISH:
        stranger.send_multipart(rubbish)
        impostor.send_multipart(rubbish)
        executor._plans.send_multipart([route, *rubbish])
    time.sleep(0.1)
    assert [step(executor, i) for i in range(3)] == generate_alone(PROMPT, 3, (), 512)
    assert executor.collective_rpc("add", [2, 3]) == [5]
    context.destroy(linger=0)
    executor.shutdown()
    directory.remove()


def test_a_worker_still_loading_ends_with_its_engine_and_removes_the_sockets() -> None:
    engine = UserScript(
        """
from paper_device import paper_config
from paper_worker import SlowMultiproc
threading.Thread(target=SlowMultiproc, args=(paper_config(),), daemon=True).start()
import psutil
while not (children := psutil.Process().children()):
    time.sleep(0.01)
say(worker=children[0].pid)
time.sleep(60)
"""
    )
    worker = engine.facts()["worker"]
    assert len(os.listdir(os.environ["TMPDIR"])) == 1
    engine.process.kill()
    engine.end()
    wait_until(lambda: not alive([worker]), "the worker gone")
