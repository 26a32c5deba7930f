"""Whoever asks and never reads what is answered: the engine goes on and keeps none of it."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

from external_site import step
from external_workers import our_path, start_worker
from paper_device import generate_alone
from paper_worker import PaperExternal, made_paper_external, open_paper_external
from plans import PROMPT
from process_tools import DEADLINE, nothing_left_behind
from stepahead.worker.handshake import PROTOCOL, Hello
from stepahead.worker.heart import Beat
from stepahead.worker.link_key import write_key_file

pytestmark = pytest.mark.timeout(90)

MOST_GROWTH = 12 << 20
"""Bytes. What they do not read is several times as much."""

SLOW_READER = """
import json, sys, time, zmq
from stepahead.worker.link_key import read_key_file
address, message, count, key_file = json.loads(sys.argv[1])
link = zmq.Context().socket(zmq.DEALER)
link.setsockopt(zmq.RCVHWM, 1)
link.setsockopt(zmq.RCVBUF, 4096)
link.setsockopt(zmq.SNDHWM, 100)
if key_file:
    read_key_file(key_file).present(link)
link.connect(address)
for _ in range(count):
    link.send(bytes.fromhex(message))
print("asked", flush=True)
time.sleep(60)
"""


class FloodedSite:
    """An executor that is being made, its worker, and those that never read."""

    def __init__(self, key_file: Path | None, pool: ThreadPoolExecutor) -> None:
        self._key_file = key_file
        settings = {} if key_file is None else {"key_file": str(key_file)}
        self._coming, self.address = open_paper_external(pool, executor_address="tcp://127.0.0.1:0", **settings)
        self._readers: list[subprocess.Popen[str]] = []
        self._worker: subprocess.Popen[str] | None = None

    def executor(self) -> PaperExternal:
        self._worker = self._worker or start_worker(self.address, "--rank", "0", key_file=self._key_file)
        return made_paper_external(self._coming)

    def flood(self, address: str, message: bytes, times: int, meanwhile: Callable[[], None]) -> int:
        """Until somebody has sent `message` so many times, who then goes on not reading. Returns: by how many bytes
        this process has grown."""
        process = psutil.Process()
        before = process.memory_info().rss
        told = json.dumps([address, message.hex(), times, None if self._key_file is None else str(self._key_file)])
        reader = subprocess.Popen(
            [sys.executable, "-c", SLOW_READER, told], env={"PYTHONPATH": our_path()}, stdout=subprocess.PIPE, text=True
        )
        self._readers.append(reader)
        assert reader.stdout is not None
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(reader.stdout.readline)
            while not asked.done():
                meanwhile()
            assert asked.result() == "asked\n"
        return process.memory_info().rss - before

    def close(self) -> None:
        for reader in self._readers:
            reader.kill()
            reader.communicate()
        self.executor().shutdown()
        assert self._worker is not None
        _, errors = self._worker.communicate(timeout=DEADLINE)
        assert self._worker.returncode == 0, errors


@pytest.fixture(params=["with the key", "on loopback"])
def site(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[FloodedSite]:
    caplog.set_level(logging.WARNING, "stepahead")
    key_file = tmp_path / "key" if request.param == "with the key" else None
    if key_file is not None:
        write_key_file(key_file)
    with nothing_left_behind(monkeypatch), ThreadPoolExecutor(1) as pool:
        place = FloodedSite(key_file, pool)
        try:
            yield place
        finally:
            place.close()


def test_workers_that_are_refused_and_never_hear_it_cost_no_memory(
    site: FloodedSite, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    hello = msgspec.msgpack.encode(Hello(PROTOCOL, 7, 0, 1, host="h" * 255, pid=1, machine="m" * 255))
    growth = site.flood(site.address, hello, 150_000, lambda: time.sleep(0.05))
    refusals = [message for message in caplog.messages if "refused a worker" in message]
    assert 1 <= len(refusals) <= 1 + (time.monotonic() - began) // 10
    executor = site.executor()
    assert [step(executor, i) for i in range(3)] == generate_alone(PROMPT, 3, (), 512)
    assert growth < MOST_GROWTH


def test_beats_whose_echo_nobody_takes_cost_no_memory_and_steps_go_on(
    site: FloodedSite, caplog: pytest.LogCaptureFixture
) -> None:
    executor = site.executor()
    assert executor._registration is not None
    addresses = executor._registration._addresses
    assert addresses.health is not None
    seen: list[int] = []

    def go_on() -> None:
        if len(seen) < 10:  # a plan by hand has one block
            seen.append(step(executor, len(seen)))
        time.sleep(0.05)

    silent = socket.create_connection(("127.0.0.1", int(addresses.replies.rpartition(":")[2])))
    long_beat = msgspec.msgpack.encode([Beat(0).rank, bytes(1900)])  # a version to come may say more
    growth = site.flood(addresses.health, long_beat, 60_000, go_on)
    seen.append(step(executor, len(seen)))
    assert seen == generate_alone(PROMPT, len(seen), (), 512)
    assert growth < MOST_GROWTH
    assert len(caplog.messages) <= 1, caplog.messages
    silent.close()
