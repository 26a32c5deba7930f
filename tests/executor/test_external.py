"""Workers that somebody else starts: who is taken, who is refused, and how each end notices that the other has gone."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

import stepahead
from external_site import Site, hello, lines, step
from external_workers import start_worker
from paper_device import generate_alone, paper_config
from paper_worker import PaperExternal
from plans import PROMPT
from ports import port_below_the_ephemeral
from process_tools import DEADLINE, nothing_left_behind, wait_until
from stepahead.errors import ConfigError, WorkerError
from stepahead.worker.handshake import PROTOCOL
from stepahead.worker.link_key import read_key_file, write_key_file

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _nothing_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with nothing_left_behind(monkeypatch):
        yield


@pytest.fixture
def site(_nothing_left_behind: None) -> Iterator[Site]:
    place = Site()
    yield place
    place.close()


def test_workers_come_in_any_order_work_and_leave_with_the_engine(site: Site, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    site.open(f"ipc://{tmp_path}/plans", tensor_parallel_size=2)
    workers = [site.worker(1), site.worker(0)]
    executor = site.executor()
    assert [info.rank for info in executor.worker_infos()] == [0, 1]
    assert [step(executor, i) for i in range(4)] == generate_alone(PROMPT, 4, (), 512)
    assert executor.collective_rpc(lambda worker: worker.rank) == [0, 1]
    executor.shutdown()
    assert [worker.wait(DEADLINE) for worker in workers] == [0, 0]
    assert os.listdir(tmp_path) == []


def test_an_open_link_carries_no_callables(site: Site) -> None:
    site.open()
    site.worker(0)
    executor = site.executor()
    with pytest.raises(ConfigError, match="a callable needs ipc:// or a key_file"):
        executor.collective_rpc(lambda worker: worker.rank)
    assert executor.collective_rpc("add", [1, 2]) == [3]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (hello(protocol=PROTOCOL + 1), rf"version {PROTOCOL + 1} of the protocol, not {PROTOCOL}"),
        (msgspec.msgpack.encode([PROTOCOL + 7, {"all": "new"}]), rf"version {PROTOCOL + 7} of the protocol"),
        (hello(rank=5), "rank 5 is not among the 1 that are expected"),
        (hello(local_rank=3), "local rank 3 is not below the 1 of its machine"),
        (msgspec.msgpack.encode([PROTOCOL, "zero"]), "its greeting makes no sense"),
    ],
)
def test_a_worker_that_does_not_fit_is_told_why_in_one_log_line_and_the_engine_goes_on(
    site: Site, message: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    site.open()
    stranger = site.stranger()
    for _ in range(3):
        stranger.send(message)
        assert stranger.poll(5000)
        tag, told = msgspec.msgpack.decode(stranger.recv())
        assert tag == 12
        assert re.search(reason, told)
    assert len(lines(caplog, "refused a worker")) == 1
    site.worker(0)
    assert step(site.executor(), 0) == generate_alone(PROMPT, 1, (), 512)[0]


def test_a_second_worker_of_a_rank_ends_with_the_reason(site: Site) -> None:
    site.open(tensor_parallel_size=2)
    stranger = site.stranger()
    stranger.send(hello(rank=0, machine="elsewhere", rendezvous="nowhere"))
    assert stranger.poll(5000)
    second = site.worker(0)
    _, errors = second.communicate(timeout=DEADLINE)
    assert second.returncode == 2
    assert "rank 0 has come already (from h, pid 1)" in errors
    assert "Traceback" not in errors


def test_rubbish_on_every_link_is_dropped_and_the_engine_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stepahead.executor.links._ANSWER_LIMIT", 1 << 16)
    site.open()
    raw = [socket.create_connection(("127.0.0.1", int(site.address.rpartition(":")[2]))) for _ in range(3)]
    for number, connection in enumerate(raw):
        connection.sendall(bytes([0xFF]) * 3 + os.urandom(4000 * number))
    stranger = site.stranger()
    for rubbish in ([b""], [b"\xc1"], [os.urandom(100)], [hello(), b"x"], [b"a"] * 40):
        stranger.send_multipart(rubbish)
    site.worker(0)
    executor = site.executor()
    assert executor._registration is not None
    addresses = executor._registration._addresses
    assert addresses.health is not None
    huge = [site.stranger(zmq.PUSH, addresses.replies), site.stranger(zmq.DEALER, addresses.health), stranger]
    for link in huge:
        link.send(bytes(4 << 20))
    site.stranger(zmq.PUSH, addresses.replies).send(b"\xc1")
    site.stranger(zmq.DEALER, addresses.health).send(b"\xc1")
    for link in ("replies", "health", "plans"):
        wait_until(lambda link=link: lines(caplog, f"{link} link: a connection ended.*over"), f"{link}'s huge frame")
    wait_until(lambda: lines(caplog, "no beat of a worker"), "a bad beat dropped")
    assert [step(executor, i) for i in range(3)] == generate_alone(PROMPT, 3, (), 512)
    assert len(lines(caplog, "no worker's greeting")) == 1
    assert len(lines(caplog, "dropped a message: not a valid message")) == 1
    for connection in raw:
        connection.close()


def test_only_the_key_opens_the_links(site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_key_file(tmp_path / "key")
    write_key_file(tmp_path / "other")
    site.open(key_file=str(tmp_path / "key"))
    for wrong in (tmp_path / "other", None):
        refused = site.worker(0, wrong)
        _, errors = refused.communicate(timeout=DEADLINE)
        assert refused.returncode == 2, errors
        assert "key" in errors
        assert "Traceback" not in errors
    wait_until(lambda: lines(caplog, "plans link: refused"), "a line about them")
    half = site.context.socket(zmq.DEALER)  # it knows the engine's public key, and has a key of its own
    half.curve_serverkey = read_key_file(tmp_path / "key").public
    half.curve_publickey, half.curve_secretkey = zmq.curve_keypair()
    half.connect(site.address)
    half.send(hello())
    wait_until(lambda: lines(caplog, "whose key is not the one in key_file"), "a line about it")
    assert not half.poll(200)
    site.worker(0, tmp_path / "key")
    executor = site.executor()
    assert step(executor, 0) == generate_alone(PROMPT, 1, (), 512)[0]
    assert executor.collective_rpc(lambda worker: worker.rank) == [0]


def test_ranks_with_a_key_may_come_seconds_apart_and_the_engine_says_whom_it_waits_for(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepahead.executor.external._FIRST_CALL_S", 2.5)  # the links' first heartbeats come after one
    write_key_file(tmp_path / "key")
    site.open(key_file=str(tmp_path / "key"), tensor_parallel_size=2)
    site.worker(1, tmp_path / "key")
    wait_until(lambda: lines(caplog, "still waiting for ranks 0: "), "a line about rank 0")
    (told,) = lines(caplog, "still waiting")
    assert f"--connect {site.address} --key-file {tmp_path}/key --rank RANK --local-rank GPU" in told
    time.sleep(1.5)
    site.worker(0, tmp_path / "key")
    executor = site.executor()
    assert [step(executor, i) for i in range(3)] == generate_alone(PROMPT, 3, (), 512)


def test_a_worker_that_nobody_answers_in_time_ends_with_a_line(site: Site) -> None:
    address = f"tcp://127.0.0.1:{port_below_the_ephemeral()}"
    worker = start_worker(address, "--rank", "3", "--join-timeout", "0.5")
    _, errors = worker.communicate(timeout=DEADLINE)
    assert worker.returncode == 2
    assert errors == f"stepahead worker: error: rank 3: no engine has answered at {address} within 0.5 seconds\n"


def test_a_worker_that_nobody_answers_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"tcp://127.0.0.1:{port_below_the_ephemeral()}"
    worker = site.worker(3, address=address)
    assert worker.stderr is not None
    assert worker.stderr.readline() == f"rank 3: no engine answers at {address}; still trying\n"
    worker.kill()


def test_a_result_longer_than_the_link_takes_is_the_callers_error_and_the_worker_stays(
    site: Site, tmp_path: Path
) -> None:
    write_key_file(tmp_path / "key")
    site.open(key_file=str(tmp_path / "key"))
    site.worker(0, tmp_path / "key")
    executor = site.executor()
    with pytest.raises(WorkerError, match=r"the result has \d+ bytes, and at most \d+ are taken"):
        executor.collective_rpc(lambda worker: bytes(100 << 20))
    assert executor.collective_rpc("add", [1, 2]) == [3]


def test_an_engine_others_can_reach_takes_as_many_descriptors_as_it_may_have(site: Site) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        site.open()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 16)
        site.worker(0)
        site.executor()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_killed_worker_of_this_machine_is_named_at_once(site: Site) -> None:
    site.open(tensor_parallel_size=2)
    workers = [site.worker(rank) for rank in (0, 1)]
    executor = site.executor()
    told = threading.Event()
    executor.watch(told.set)
    began = time.monotonic()
    workers[1].kill()
    assert told.wait(5)
    with pytest.raises(WorkerError, match=rf"worker rank 1: is gone \(pid {workers[1].pid} on "):
        executor.check_health()
    assert time.monotonic() - began < 5


def test_a_silent_worker_is_given_up(site: Site) -> None:
    site.open(worker_timeout=1.5)
    worker = site.worker(0)
    executor = site.executor()
    told = threading.Event()
    executor.watch(told.set)
    assert not told.wait(2.5), "one that beats is not given up"
    os.kill(worker.pid, signal.SIGSTOP)
    assert told.wait(10)
    with pytest.raises(WorkerError, match=r"worker rank 0: was not heard of for 1.5 seconds"):
        executor.check_health()
    worker.kill()


def test_a_worker_that_stood_still_does_not_take_it_for_the_engines_silence(site: Site) -> None:
    code = """
import sys, time, zmq
from stepahead.worker.heart import start_beating
start_beating(zmq.Context(), sys.argv[1], None, 0, 1.5)
time.sleep(60)
"""
    echo = site.context.socket(zmq.ROUTER)
    port = echo.bind_to_random_port("tcp://127.0.0.1")
    path = str(Path(stepahead.__file__).parent.parent)
    worker = subprocess.Popen(
        [sys.executable, "-c", code, f"tcp://127.0.0.1:{port}"], env={**os.environ, "PYTHONPATH": path}
    )

    def answer_for(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if echo.poll(50):
                echo.send_multipart(echo.recv_multipart())

    assert echo.poll(10_000)
    answer_for(0.5)
    os.kill(worker.pid, signal.SIGSTOP)
    answer_for(4)
    os.kill(worker.pid, signal.SIGCONT)
    answer_for(3)
    assert worker.poll() is None
    worker.kill()
    worker.wait()


def test_a_worker_whose_engine_is_gone_leaves(site: Site) -> None:
    code = """
import time, zmq
from stepahead.worker.heart import start_beating
start_beating(zmq.Context(), "ipc:///tmp/no-engine-is-here", None, 0, 1.0)
time.sleep(30)
"""
    path = str(Path(stepahead.__file__).parent.parent)
    begin = time.monotonic()
    worker = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=20
    )
    assert worker.returncode == 1
    assert "no sign of the engine for 1 seconds" in worker.stderr
    assert time.monotonic() - begin < 10


def test_a_port_in_use_and_a_folder_open_to_others_are_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{address}.*Address already in use"):
            PaperExternal(paper_config(executor_address=address))
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=f"the folder {tmp_path} must be yours alone"):
        PaperExternal(paper_config(executor_address=f"ipc://{tmp_path}/plans"))


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "stepahead")
