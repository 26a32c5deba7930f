"""A worker's link to its engine: who is greeted, what is read before the loss of a link counts, and when it does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import zmq

from paper_device import paper_config
from stepahead.errors import LinkLostError
from stepahead.worker.codec import Codec
from stepahead.worker.engine_link import PROBE, EngineLink
from stepahead.worker.handshake import Hello, Join, Place, Start, await_join, register
from stepahead.worker.messages import Shutdown

pytestmark = pytest.mark.timeout(30)


class Engine:
    """A ROUTER that can end and come back at the same port."""

    def __init__(self) -> None:
        self._codec: Codec[Any] = Codec(Any)
        self.port = 0
        self.begin()

    def begin(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"tcp://127.0.0.1:{self.port or '*'}")
        self.port = int(self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0").rpartition(":")[2])

    def greeting(self) -> Hello:
        assert self._socket.poll(10_000)
        self._route, body = self._socket.recv_multipart()
        return msgspec.msgpack.decode(body, type=Hello)

    def say(self, *words: Any) -> None:
        for word in words:
            frames = [word] if isinstance(word, bytes) else self._codec.encode(word)
            self._socket.send_multipart([self._route, *frames])

    def end(self, linger: int = 0) -> None:
        self._context.destroy(linger=linger)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.end()


class Worker:
    def __init__(self, engine: Engine) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link = EngineLink(self.context)
        self.replies = self.context.socket(zmq.PUSH)
        self._engine = engine
        self._pool = ThreadPoolExecutor(1)

    def register(self) -> Any:
        address = f"tcp://127.0.0.1:{self._engine.port}"
        return self._pool.submit(register, self.link, address, Place(0, 0, 1), None, None)

    def close(self) -> None:
        self._pool.shutdown()
        self.replies.close()
        self.link.close()
        self.context.term()


@pytest.fixture
def worker(engine: Engine) -> Iterator[Worker]:
    made = Worker(engine)
    yield made
    made.close()


START = Start(paper_config(), 0, "a:B", "tcp://127.0.0.1:1")


def take(engine: Engine, worker: Worker) -> None:
    """The engine takes the worker, which from then on watches both links."""
    started = worker.register()
    engine.greeting()
    engine.say(START)
    started.result(10)
    worker.link.watch(worker.replies)


def test_every_new_connection_is_greeted_until_an_engine_answers(engine: Engine, worker: Worker) -> None:
    started = worker.register()
    seen = [engine.greeting()]
    for _ in range(2):
        engine.end()
        engine.begin()
        seen.append(engine.greeting())
    engine.say(START)
    assert started.result(10).replies == START.replies
    assert seen == seen[:1] * 3


def test_what_answers_a_second_greeting_and_probes_are_passed_over(engine: Engine, worker: Worker) -> None:
    started = worker.register()
    engine.greeting()
    engine.say(START, START, PROBE, Join("tcp://a:1"), PROBE, Shutdown())
    started.result(10)
    assert await_join(worker.link) == Join("tcp://a:1")
    assert await_join(worker.link) == Shutdown()


def test_what_came_before_a_watched_link_was_lost_is_read_before_that_counts(engine: Engine, worker: Worker) -> None:
    take(engine, worker)
    engine.say(Join(None), Shutdown())
    engine.end(linger=1000)
    time.sleep(0.3)  # its end is known here too
    assert await_join(worker.link) == Join(None)
    assert await_join(worker.link) == Shutdown()
    with pytest.raises(LinkLostError):
        worker.link.receive()


def test_the_loss_of_the_other_link_counts_too(engine: Engine, worker: Worker) -> None:
    take(engine, worker)
    pull = worker.context.socket(zmq.PULL)
    worker.replies.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
    worker.replies.send(b"")
    assert pull.recv() == b""
    pull.close()
    with pytest.raises(LinkLostError, match="lost its link to the engine"):
        worker.link.receive()
