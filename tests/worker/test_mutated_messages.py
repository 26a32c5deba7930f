"""2,000 mutated messages for each socket: refused or understood, never a crash, never a growing process."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from mutations import KINDS, mutate, one_odd_value
from paper_device import paper_config
from paper_worker import PaperWorker
from stepahead.engine_core.messages import ClientMessage, EngineMessage
from stepahead.executor.registration import Addresses, Registration
from stepahead.worker.codec import Codec, CodecError
from stepahead.worker.heart import Beat
from stepahead.worker.messages import Call, CallReply, Shutdown, WorkerReply, WorkerRpc
from stepahead.worker.process import serve

TYPES: dict[str, Any] = {
    "client inputs": ClientMessage,
    "client outputs": EngineMessage,
    "worker plans": WorkerRpc,
    "replies": WorkerReply,
    "health": Beat,
}
MANY = 2000
LAST = 4242
MOST_GROWTH = 32 << 20
seeds = st.integers(0, 2**63)


def arrays_in(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, msgspec.Struct):
        value = [getattr(value, name) for name in value.__struct_fields__]
    if isinstance(value, dict):
        value = list(value.values())
    return [array for item in value for array in arrays_in(item)] if isinstance(value, list) else []


@pytest.mark.parametrize("kind", TYPES)
def test_a_mutated_message_is_refused_or_understood(kind: str) -> None:
    codec: Codec[Any] = Codec(TYPES[kind])
    before = psutil.Process().memory_info().rss
    understood = 0

    @settings(max_examples=MANY, deadline=None, derandomize=True, database=None)
    @given(seeds)
    def check(seed: int) -> None:
        nonlocal understood
        frames = mutate(kind, seed)
        try:
            message = codec.decode(frames)
        except CodecError:
            return
        understood += 1
        assert sum(array.nbytes for array in arrays_in(message)) <= 100 * sum(map(len, frames))
        assert codec.encode(message)

    check()
    assert understood > 20, "mutations that no check but the last one sees"
    assert psutil.Process().memory_info().rss - before < MOST_GROWTH


def test_a_mutated_greeting_gets_an_answer_or_none_and_no_place_that_is_not_there() -> None:
    config = paper_config(tensor_parallel_size=2)
    before = psutil.Process().memory_info().rss

    @settings(max_examples=MANY, deadline=None, derandomize=True, database=None)
    @given(seeds)
    def check(seed: int) -> None:
        registration = Registration(config, "a:b", Addresses("ipc://a", "ipc://b", "ipc://c"))
        hello, answer = registration.answer(b"route", mutate("handshake", seed))
        assert hello is None or (0 <= hello.rank < 2 and answer is not None)

    check()
    assert psutil.Process().memory_info().rss - before < MOST_GROWTH


class Replies:
    """In the place of the output-copy thread."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.all = threading.Semaphore(0)

    def put(self, reply: Any) -> None:
        self.answers.append(reply)
        if isinstance(reply, CallReply) and reply.call_id == LAST:
            self.all.release()


def test_a_worker_goes_on_answering_whatever_comes_over_its_link() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine, plans = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    plans.routing_id = b"worker"
    port = engine.bind_to_random_port("tcp://127.0.0.1")
    plans.connect(f"tcp://127.0.0.1:{port}")
    plans.send(b"")
    engine.recv_multipart()
    codec: Codec[Any] = Codec(WorkerRpc)
    worker: Any = PaperWorker(paper_config())
    worker.initialize_cache(64, 512)
    replies: Any = Replies()
    thread = threading.Thread(target=serve, args=(worker, 0, plans.recv_multipart, replies, False))
    thread.start()
    for frames in itertools.chain(one_odd_value("worker plans"), (mutate("worker plans", n) for n in range(400))):
        try:
            ends = isinstance(codec.decode(frames), Shutdown)
        except CodecError:
            ends = False
        if not ends:
            engine.send_multipart([b"worker", *frames])
    engine.send_multipart([b"worker", *codec.encode(Call(LAST, "add", [1, 2]))])
    assert replies.all.acquire(timeout=20)
    assert replies.answers[-1] == CallReply(LAST, 0, 3)
    engine.send_multipart([b"worker", *codec.encode(Shutdown())])
    thread.join(10)
    assert not thread.is_alive()
    context.destroy(linger=0)


def test_every_socket_has_its_mutations() -> None:
    assert {*TYPES, "handshake"} == KINDS.keys()
