"""Links that break between an engine and workers that it did not start: nobody waits for what was lost on them."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from cable import Cable
from external_site import Site, hello, lines, step
from paper_device import generate_alone
from paper_worker import PaperExternal
from plans import PROMPT
from process_tools import DEADLINE, UserScript, nothing_left_behind, wait_until
from stepahead.errors import WorkerError
from stepahead.executor.registration import Addresses
from stepahead.worker.addresses import split_tcp
from stepahead.worker.messages import Failure

pytestmark = pytest.mark.timeout(60)

REFUSED = 12
"""The answer's tag."""

SOON = 12.0
"""Seconds: far below a step's time-out."""

STEP_MS = 200
STEPS = 12


class CabledExternal(PaperExternal):
    """cables: of the executor made last, one for each link."""

    cables: dict[str, Cable]

    def _bind(self) -> Addresses:
        bound = msgspec.structs.asdict(msgspec.convert(super()._bind(), _Bound, from_attributes=True))
        CabledExternal.cables = {name: Cable(split_tcp(address)[1]) for name, address in bound.items()}
        return Addresses(**{name: f"tcp://127.0.0.1:{cable.port}" for name, cable in self.cables.items()})


class _Bound(msgspec.Struct):
    plans: str
    replies: str
    health: str


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stepahead")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with nothing_left_behind(monkeypatch):
        place = Site(CabledExternal)
        yield place
        place.close()
        for cable in CabledExternal.cables.values():
            cable.close()


@pytest.mark.parametrize(
    ("link", "said"),
    [("plans", "lost its link to the engine"), ("replies", r"(is gone \(pid \d+ on |lost its link to the engine)")],
)
def test_a_link_cut_while_steps_run_ends_worker_and_engine_at_once(site: Site, link: str, said: str) -> None:
    site.open(step_ms=STEP_MS)
    worker = site.worker(0)
    executor = site.executor()
    told = threading.Event()
    executor.watch(told.set)
    assert step(executor, 0) == generate_alone(PROMPT, 1, (), 512)[0]
    timer = threading.Timer(1.5 * STEP_MS / 1000, CabledExternal.cables[link].cut)
    timer.start()
    began = time.monotonic()
    with pytest.raises(WorkerError, match=f"worker rank 0: {said}"):
        [step(executor, step_id) for step_id in range(1, STEPS)]
    assert told.wait(SOON), "an idle engine would have been told too"
    executor.shutdown()
    _, errors = worker.communicate(timeout=DEADLINE)
    assert time.monotonic() - began < SOON
    assert worker.returncode == 1
    assert errors.count("lost the link to the engine; leaving") == 1
    assert "Traceback" not in errors


def test_a_rank_that_is_not_reached_is_named_and_the_others_still_are(site: Site) -> None:
    site.open(tensor_parallel_size=2)
    own = Cable(CabledExternal.cables["plans"].port)
    workers = [site.worker(0, address=f"tcp://127.0.0.1:{own.port}"), site.worker(1)]
    executor = site.executor()
    os.kill(workers[0].pid, signal.SIGSTOP)  # it cannot notice by itself
    own.cut()
    began = time.monotonic()
    with pytest.raises(WorkerError, match="worker rank 0: lost its link to the engine"):
        executor.collective_rpc("add", [1, 2])
    assert executor._call_values == {1: 3}
    executor.shutdown()
    assert time.monotonic() - began < SOON
    _, errors = workers[1].communicate(timeout=DEADLINE)
    assert workers[1].returncode == 1
    assert [line.endswith("the engine has failed; leaving") for line in errors.splitlines()] == [True]
    os.kill(workers[0].pid, signal.SIGCONT)
    assert workers[0].wait(DEADLINE) == 1
    own.close()


def test_a_cable_that_goes_dead_without_a_word_is_noticed_while_a_step_is_awaited(site: Site) -> None:
    site.open(worker_timeout=1.2)  # links have six times as long
    worker = site.worker(0)
    executor = site.executor()
    step(executor, 0)
    CabledExternal.cables["plans"].freeze()
    began = time.monotonic()
    with pytest.raises(WorkerError, match="worker rank 0: lost its link to the engine"):
        step(executor, 1)
    executor.shutdown()
    assert time.monotonic() - began < SOON
    assert worker.wait(DEADLINE) == 1


def test_an_end_that_was_asked_for_says_nothing_and_every_thread_ends_its_own_monitor(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[int, str]] = []

    def disable_monitor(self: zmq.Socket[bytes]) -> None:
        ended.append((self.type, threading.current_thread().name))
        original(self)

    original = zmq.Socket.disable_monitor
    site.open()
    worker = site.worker(0)
    executor = site.executor()
    step(executor, 0)
    caplog.clear()
    monkeypatch.setattr(zmq.Socket, "disable_monitor", disable_monitor)
    executor.shutdown()
    here = threading.current_thread().name
    assert sorted(ended) == sorted([(zmq.ROUTER, "heartbeats"), (zmq.ROUTER, here), (zmq.PULL, here)])
    _, errors = worker.communicate(timeout=DEADLINE)
    assert (worker.returncode, errors) == (0, "")
    assert caplog.messages == []


ENGINE = """
from paper_device import paper_config
from paper_worker import PaperExternal
class Engine(PaperExternal):
    since = 0
    def _start_workers(self, address):
        say(address=address)
    def _welcome(self, hello):
        super()._welcome(hello)
        say(came=hello.rank)
        self.since = self._heartbeats._last[hello.rank]
    def _wait_longer(self):
        if self._heartbeats._last.get(0, self.since) > self.since:
            say(beats=0)
Engine(paper_config(executor_address={address!r}, tensor_parallel_size={size}))
"""


@pytest.fixture
def bare_site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with nothing_left_behind(monkeypatch):
        place = Site()
        yield place
        place.close()


def test_an_engine_that_is_killed_before_all_have_come_takes_those_that_have_with_it(bare_site: Site) -> None:
    engine = UserScript(ENGINE.format(address="tcp://127.0.0.1:0", size=2))
    worker = bare_site.worker(0, address=engine.facts()["address"])
    assert engine.facts() == {"came": 0}
    assert engine.facts() == {"beats": 0}, "it knows that it was taken"
    began = time.monotonic()
    engine.process.kill()
    engine.end()
    _, errors = worker.communicate(timeout=DEADLINE)
    assert time.monotonic() - began < SOON
    assert worker.returncode == 1
    assert errors.count("\n") == 1
    assert "lost the link to the engine; leaving" in errors


def test_a_worker_whose_engine_died_before_it_answered_greets_the_next_one(bare_site: Site) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    first = context.socket(zmq.ROUTER)
    port = first.bind_to_random_port("tcp://127.0.0.1")
    bare_site.worker(0, address=f"tcp://127.0.0.1:{port}")
    assert first.poll(DEADLINE * 1000)
    greeting = first.recv_multipart()[1]
    context.destroy(linger=0)
    bare_site.open(f"tcp://127.0.0.1:{port}")
    executor = bare_site.executor()
    assert step(executor, 0) == generate_alone(PROMPT, 1, (), 512)[0]
    assert executor._registration is not None
    assert msgspec.msgpack.encode(executor._registration.hellos[0]) == greeting


def test_until_all_have_come_the_same_process_may_come_again_and_no_other(
    bare_site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    bare_site.open(tensor_parallel_size=2)

    def answer_to(**fields: object) -> str:
        link = bare_site.stranger()
        link.send(hello(**{"machine": "elsewhere", "rendezvous": "tcp://127.0.0.1:1", **fields}))
        assert link.poll(5000)
        tag, *answer = msgspec.msgpack.decode(link.recv())
        if tag == REFUSED:
            return "refused"
        replies.append(answer[3])
        return "taken"

    replies: list[str] = []
    answers = [answer_to(), answer_to(), answer_to(pid=2), answer_to(host="other")]
    assert answers == ["taken", "taken", "refused", "refused"]
    assert len(lines(caplog, "refused a worker .*rank 0 has come already")) == 1
    assert answer_to(rank=1) == "taken"
    wait_until(lambda: lines(caplog, "rank 1 has come"), "all have come")
    assert answer_to() == "refused"
    failure = Failure(rank=0, message="the test is over", traceback="")
    bare_site.stranger(zmq.PUSH, replies[0]).send(msgspec.msgpack.encode(failure))


def test_an_ipc_address_has_one_engine_at_a_time_and_a_dead_ones_is_taken_over(tmp_path: Path, bare_site: Site) -> None:
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/plans"
    first = UserScript(ENGINE.format(address=address, size=2))
    assert first.facts() == {"address": address}
    before = sorted(os.listdir(tmp_path))
    second = UserScript(ENGINE.format(address=address, size=2))
    code, errors = second.end()
    assert code == 1
    assert f"ConfigError: executor_address='{address}' is in use by another engine" in errors
    assert sorted(os.listdir(tmp_path)) == before, "what is the first one's stays"
    stranger = bare_site.stranger(address=address)
    stranger.send(hello())
    assert first.facts() == {"came": 0}
    first.process.kill()
    first.end()
    bare_site.open(address)
    bare_site.worker(0)
    executor = bare_site.executor()
    assert step(executor, 0) == generate_alone(PROMPT, 1, (), 512)[0]
    executor.shutdown()
    assert os.listdir(tmp_path) == []
