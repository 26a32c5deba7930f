"""The engine-core process, driven by a test that holds its client's end of the sockets."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from mutations import mutate, one_odd_value
from noisy_engine import RUBBISH
from paper_device import generate_alone, paper_config
from paper_worker import request
from process_tools import nothing_left_behind
from stepahead.engine_core.messages import (
    AbortRequests,
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
from stepahead.engine_core.process import EngineStart, InboxItem, run_busy_loop
from stepahead.worker.child_process import ChildProcess, stop_all
from stepahead.worker.codec import Codec, CodecError
from stepahead.worker.sockets import SocketDirectory, open_socket

pytestmark = pytest.mark.timeout(60)


class Link:
    """A client by hand."""

    def __init__(self, executor: str = "PaperMultiproc", **settings: Any) -> None:
        self._directory = SocketDirectory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inputs = open_socket(self._context, zmq.PUSH)
        self.outputs = open_socket(self._context, zmq.PULL)
        start = EngineStart(
            config=paper_config(executor=f"paper_worker:{executor}", **settings),
            inputs=self._directory.address("inputs"),
            outputs=self._directory.address("outputs"),
        )
        self.inputs.bind(start.inputs)
        self.outputs.bind(start.outputs)
        message = msgspec.msgpack.encode(start)
        self.process = ChildProcess("stepahead.engine_core.process:main", "engine", message, self._directory)
        self._encoder: Codec[ClientMessage] = Codec(ClientMessage)
        self._decoder: Codec[EngineMessage] = Codec(EngineMessage)

    def send(self, message: ClientMessage) -> None:
        self.inputs.send_multipart(self._encoder.encode(message))

    def receive(self) -> EngineMessage:
        assert self.outputs.poll(15_000)
        return self._decoder.decode(self.outputs.recv_multipart())

    def receive_tokens(self) -> list[int]:
        """Until a request finishes."""
        tokens: list[int] = []
        while True:
            batch = self.receive()
            assert isinstance(batch, OutputBatch)
            tokens += batch.tokens.tolist()
            if batch.finished:
                return tokens

    def close(self) -> None:
        stop_all([self.process], 0.0)
        self._context.destroy(linger=0)
        self._directory.remove()


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Link]]:
    with nothing_left_behind(monkeypatch):
        opened: list[Link] = []
        yield opened
        for link in opened:
            link.close()


def exit_reason(link: Link) -> str:
    assert link.process.wait(15)
    return link.process.exit_reason()


def test_the_first_message_says_what_was_resolved(links: list[Link]) -> None:
    links.append(link := Link(num_kv_blocks=4))
    info = link.receive()
    assert isinstance(info, EngineInfo)
    assert info.pid == link.process.pid
    assert (info.num_kv_blocks, info.block_size, info.max_model_len) == (4, 16, 64)
    assert info.async_scheduling
    assert "default" in info.async_reason


def test_a_failing_start_is_the_first_message_and_exit_code_1(links: list[Link]) -> None:
    links.append(link := Link("BadMultiproc"))
    failure = link.receive()
    assert isinstance(failure, StartFailure)
    assert failure.message == "worker rank 0: RuntimeError: this worker cannot start"
    assert failure.traceback.startswith("Traceback")
    assert not failure.user_error
    assert exit_reason(link) == "exited with code 1"


def test_a_config_error_is_told_from_a_bug(links: list[Link]) -> None:
    links.append(link := Link("RefusingMultiproc"))
    failure = link.receive()
    assert isinstance(failure, StartFailure)
    assert failure.user_error
    assert failure.message == "model='nowhere': no such folder"


def test_frames_that_are_no_message_are_dropped(links: list[Link]) -> None:
    links.append(link := Link())
    link.receive()
    for rubbish in RUBBISH:
        link.inputs.send_multipart(rubbish)
    link.send(request(1, max_tokens=4))
    assert link.receive_tokens() == generate_alone((1, 2, 3), 4, (), 512)
    assert not link.process.wait(0)


def test_stop_exits_with_code_0_and_takes_the_worker_along(links: list[Link]) -> None:
    links.append(link := Link())
    link.receive()
    link.send(request(1, max_tokens=400))
    link.send(Stop())
    assert exit_reason(link) == "exited with code 0"


def test_sigterm_is_told_to_the_client_and_exits_with_code_143(links: list[Link]) -> None:
    links.append(link := Link())
    link.receive()
    os.kill(link.process.pid, signal.SIGTERM)
    failure = link.receive()
    assert isinstance(failure, EngineFailed)
    assert "SIGTERM" in failure.message
    assert exit_reason(link) == "exited with code 143"


def test_sigterm_while_the_worker_loads_ends_both(links: list[Link]) -> None:
    links.append(link := Link("SlowMultiproc"))
    assert not link.outputs.poll(1000)
    os.kill(link.process.pid, signal.SIGTERM)
    failure = link.receive()
    assert isinstance(failure, StartFailure)
    assert exit_reason(link) == "exited with code 143"


def test_ctrl_c_does_not_reach_the_engine(links: list[Link]) -> None:
    links.append(link := Link())
    info = link.receive()
    assert isinstance(info, EngineInfo)
    for pid in (info.pid, *info.worker_pids):
        os.kill(pid, signal.SIGINT)
    link.send(request(1, max_tokens=4))
    assert len(link.receive_tokens()) == 4


def test_the_engine_ends_when_its_lifeline_does(links: list[Link]) -> None:
    links.append(link := Link())
    link.receive()
    link.process._lifeline.close()
    assert exit_reason(link) == "exited with code 1"


def test_a_call_is_answered_between_two_steps(links: list[Link]) -> None:
    links.append(link := Link())
    link.receive()
    link.send(UtilityCall(7, "stats"))
    link.send(UtilityCall(8, "collective_rpc", ["explode", ["as asked"]]))
    stats, error = link.receive(), link.receive()
    assert isinstance(stats, UtilityReply)
    assert stats.call_id == 7
    assert stats.value["running"] == 0
    assert isinstance(error, UtilityReply)
    assert error.call_id == 8
    assert error.error.startswith("worker rank 0: ValueError: as asked\nTraceback")


# ---- the busy loop alone ------------------------------------------------------------------------


class ScriptedEngine:
    """Has work for `steps` steps after each request. log: what was called, in order."""

    def __init__(self, steps: int = 2) -> None:
        self.early_aborts: deque[int] = deque()
        self.log: list[str] = []
        self._per_request = steps
        self._left = 0

    def add_request(self, request: Any) -> None:
        self.log.append(f"add {request.request_id}")
        self._left += self._per_request

    def abort_requests(self, request_ids: list[int]) -> None:
        self.log.append(f"abort {request_ids}")

    def has_work(self) -> bool:
        return self._left > 0

    def idle(self) -> None:
        assert not self.has_work()

    def step(self) -> OutputBatch | None:
        self.log.append("step")
        self._left -= 1
        empty = np.empty(0, np.int32)
        return OutputBatch(empty.astype(np.int64), empty, empty) if self._left % 2 == 0 else None


def run_loop(engine: ScriptedEngine, *items: InboxItem) -> list[EngineMessage]:
    inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
    for item in items:
        inbox.put(item)
    sent: list[EngineMessage] = []
    run_busy_loop(engine, inbox, sent.append)  # type: ignore[arg-type]
    return sent


def test_everything_that_has_arrived_is_taken_before_the_next_step() -> None:
    engine = ScriptedEngine()
    run_loop(engine, request(1), AbortRequests([1]), request(2), Stop())
    assert engine.log == ["add 1", "abort [1]", "add 2"]


def test_a_step_without_outputs_sends_nothing() -> None:
    engine = ScriptedEngine(steps=4)
    inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
    inbox.put(request(1))
    sent: list[EngineMessage] = []

    def send(message: EngineMessage) -> None:
        sent.append(message)
        if len(sent) == 2:
            inbox.put(Stop())

    run_busy_loop(engine, inbox, send)  # type: ignore[arg-type]
    assert engine.log == ["add 1"] + ["step"] * 4


def test_an_idle_loop_sleeps_until_something_arrives() -> None:
    engine = ScriptedEngine()
    inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
    loop = threading.Thread(target=run_busy_loop, args=(engine, inbox, lambda _: None))
    loop.start()
    loop.join(0.1)
    assert loop.is_alive()
    assert engine.log == []
    inbox.put(Stop())
    loop.join(5)
    assert not loop.is_alive()


def test_a_callable_in_the_inbox_may_end_the_loop_by_raising() -> None:
    def check_health() -> None:
        raise RuntimeError("a worker is gone")

    with pytest.raises(RuntimeError, match="a worker is gone"):
        run_loop(ScriptedEngine(), check_health)


def test_an_idle_loop_tells_the_engine_so_before_it_sleeps() -> None:
    idle: list[int] = []

    class Engine(ScriptedEngine):
        def idle(self) -> None:
            super().idle()
            idle.append(len(self.log))

    inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
    inbox.put(request(1))
    run_busy_loop(Engine(steps=2), inbox, lambda _: inbox.put(Stop()))  # type: ignore[arg-type]
    assert idle == [0, 3]


def test_whatever_comes_from_the_client_the_engine_goes_on_answering(links: list[Link]) -> None:
    links.append(link := Link("PaperUni", num_kv_blocks=64))
    assert isinstance(link.receive(), EngineInfo)
    before = psutil.Process(link.process.pid).memory_info().rss
    decoder: Codec[ClientMessage] = Codec(ClientMessage)
    for frames in itertools.chain(one_odd_value("client inputs"), (mutate("client inputs", n) for n in range(400))):
        with contextlib.suppress(CodecError):  # what the engine will say too
            if isinstance(decoder.decode(frames), Stop):
                continue
        link.inputs.send_multipart(frames)
    link.send(request(77, prompt=[9, 8, 7], max_tokens=5))
    link.send(UtilityCall(4242, "stats"))
    tokens: list[int] = []
    finished = answered = False
    while not (finished and answered):
        message = link.receive()
        assert isinstance(message, (OutputBatch, UtilityReply)), message
        if isinstance(message, UtilityReply):
            answered |= message.call_id == 4242
            continue
        places = np.repeat(message.request_ids, message.counts)
        tokens += message.tokens[places == 77].tolist()
        finished |= any(end.request_id == 77 for end in message.finished)
    assert tokens == generate_alone([9, 8, 7], 5, (), 512)
    assert psutil.Process(link.process.pid).memory_info().rss - before < 32 << 20
