"""Mutated messages on every link of an executor whose workers are not its children: dropped, and it goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import zmq

from external_site import step
from external_workers import start_worker
from mutations import mutate, one_odd_value
from paper_device import generate_alone
from paper_worker import PaperExternal, made_paper_external, open_paper_external
from plans import PROMPT
from process_tools import DEADLINE, nothing_left_behind
from stepahead.worker.codec import Codec, CodecError
from stepahead.worker.messages import Failure, WorkerReply

pytestmark = pytest.mark.timeout(60)

MUTATED = 400
MOST_GROWTH = 32 << 20


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[PaperExternal]:
    with nothing_left_behind(monkeypatch), ThreadPoolExecutor(1) as pool:
        coming, address = open_paper_external(pool)
        worker = start_worker(address, "--rank", "0")
        made = made_paper_external(coming)
        yield made
        made.shutdown()
        worker.communicate(timeout=DEADLINE)


def messages(kind: str) -> Iterator[list[bytes]]:
    """Without those that say, as far as anybody can tell, that a worker has failed."""
    codec: Codec[WorkerReply] = Codec(WorkerReply)
    for frames in itertools.chain(one_odd_value(kind), (mutate(kind, n) for n in range(MUTATED))):
        try:
            reply: Any = codec.decode(frames) if kind == "replies" else None
        except CodecError:
            reply = None
        if not isinstance(reply, Failure) or (reply.call_id is not None and not reply.lost_peer):
            yield frames


def test_an_executor_goes_on_whatever_comes_over_its_links(executor: PaperExternal) -> None:
    assert executor._registration is not None
    addresses = executor._registration._addresses
    assert addresses.health is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    process = psutil.Process()
    before = process.memory_info().rss
    seen = []
    links = {"handshake": addresses.plans, "replies": addresses.replies, "health": addresses.health}
    for step_id, (kind, address) in enumerate(links.items()):
        link = context.socket(zmq.PUSH if kind == "replies" else zmq.DEALER)
        link.connect(address)
        for frames in messages(kind):
            link.send_multipart(frames)
        executor.check_health()
        seen.append(step(executor, step_id))
        link.close(linger=1000)
    context.term()  # all has been sent
    seen.append(step(executor, 3))
    assert executor.collective_rpc("add", [1, 2], timeout=10) == [3]
    assert seen == generate_alone(PROMPT, 4, (), 512)
    assert process.memory_info().rss - before < MOST_GROWTH
