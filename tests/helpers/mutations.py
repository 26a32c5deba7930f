"""Messages that went wrong on the way: real ones, with something in them changed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from plans import plan
from stepahead.engine_core.messages import (
    AbortRequests,
    AddRequest,
    EngineRequest,
    FinishedRequest,
    OutputBatch,
    UtilityCall,
    UtilityReply,
)
from stepahead.worker.codec import Codec
from stepahead.worker.handshake import PROTOCOL, Hello
from stepahead.worker.heart import Beat
from stepahead.worker.messages import (
    Call,
    CallReply,
    ExecuteModel,
    Failure,
    GrammarMasks,
    Logprobs,
    Ready,
    SampleTokens,
    SamplingOptions,
    StepOutput,
    StepReply,
    WorkerInfo,
)

_INTS = np.arange(3, dtype=np.int32)
_LOGPROBS = Logprobs(_INTS.reshape(3, 1), np.zeros((3, 1), np.float32), _INTS)
_OPTIONS = SamplingOptions(seed=7, temperature=0.5, stop_token_ids=[1, 2], logit_bias={3: -1.5}, bad_words=[[4, 5]])

KINDS: dict[str, list[Any]] = {
    "client inputs": [
        AddRequest(EngineRequest(request_id=10**9, prompt=_INTS, options=_OPTIONS, max_tokens=3, cache_salt="s")),
        AbortRequests([10**9, 10**9 + 1]),
        UtilityCall(10**9, "stats", []),
    ],
    "client outputs": [
        OutputBatch(_INTS.astype(np.int64), _INTS, _INTS, [FinishedRequest(1, "stop", 2)], _LOGPROBS),
        UtilityReply(10**9, {"a": [1, 2.5, None]}),
    ],
    "worker plans": [
        ExecuteModel(plan(0)),
        SampleTokens(7, GrammarMasks(_INTS, np.zeros((3, 2), np.uint32))),
        Call(10**9, "add", [1, 2]),
    ],
    "replies": [
        Ready(WorkerInfo(rank=0, device="paper", kv_blocks=64, pid=1)),
        StepReply(StepOutput(10**9, _INTS.reshape(3, 1), _INTS, _LOGPROBS)),
        CallReply(10**9, 0, [1, "two"]),
        Failure(rank=0, message="m", traceback="t", call_id=10**9),
    ],
    "handshake": [Hello(PROTOCOL, 7, 0, 1, "host", 1, "machine", "tcp://127.0.0.1:1")],
    "health": [Beat(0)],
}
"""By socket, of every kind that travels there and ends nothing by itself."""

_ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, -(2**63), 2**63 - 1, 2**64 - 1, 0.5, float("nan"), float("-inf"), "", "é" * 300, b"",
    [], {}, [[[[]]]], {"a": {}}, [2**31] * 4, "<i8", "<f4", "|u1", "|O", [0], [1], [1, 1], [2],
]  # fmt: skip


def mutate(kind: str, seed: int) -> list[bytes]:
    """Frames. The same for the same seed."""
    chance = random.Random(seed)
    frames = Codec(Any).encode(chance.choice(KINDS[kind]))
    for _ in range(chance.randint(1, 3)):
        frames = chance.choice(_WAYS)(frames, chance)
    return frames


def one_odd_value(kind: str) -> Iterator[list[bytes]]:
    """Frames of every message in which one value, anywhere in the tree, is another one."""
    for message in KINDS[kind]:
        head, *arrays = Codec(Any).encode(message)
        tree = [msgspec.msgpack.decode(head)]
        for place, key in list(_places(tree)):
            true = place[key]
            for odd in _ODD:
                place[key] = odd
                yield [msgspec.msgpack.encode(tree[0]), *arrays]
            place[key] = true


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    keys = node if isinstance(node, dict) else range(len(node))
    for key in keys:
        yield node, key
        if isinstance(node[key], (list, dict)):
            yield from _places(node[key])


def _change_a_value(frames: list[bytes], chance: random.Random) -> list[bytes]:
    """What arrives is well-formed, but makes no sense."""
    try:
        tree = [msgspec.msgpack.decode(frames[0])]
    except (IndexError, msgspec.MsgspecError, ValueError, RecursionError):
        return frames
    place: Any = tree
    key: Any = 0
    while isinstance(place[key], (list, dict)) and place[key] and chance.random() < 0.9:
        place = place[key]
        key = chance.choice(list(place)) if isinstance(place, dict) else chance.randrange(len(place))
    place[key] = chance.choice(_ODD)
    return [msgspec.msgpack.encode(tree[0]), *frames[1:]]


def _change_bytes(frames: list[bytes], chance: random.Random) -> list[bytes]:
    return _in_one_frame(frames, chance, lambda data, at: data[:at] + chance.randbytes(1) + data[at + 1 :])


def _cut(frames: list[bytes], chance: random.Random) -> list[bytes]:
    return _in_one_frame(frames, chance, lambda data, at: data[:at])


def _remove_bytes(frames: list[bytes], chance: random.Random) -> list[bytes]:
    return _in_one_frame(frames, chance, lambda data, at: data[:at] + data[at + chance.randint(1, 9) :])


def _insert_bytes(frames: list[bytes], chance: random.Random) -> list[bytes]:
    return _in_one_frame(
        frames, chance, lambda data, at: data[:at] + chance.randbytes(chance.randint(1, 9)) + data[at:]
    )


def _change_frames(frames: list[bytes], chance: random.Random) -> list[bytes]:
    more = [*frames, chance.randbytes(chance.randint(0, 40))]
    return chance.sample(more, chance.randint(1, len(more)))


def _in_one_frame(frames: list[bytes], chance: random.Random, change: Any) -> list[bytes]:
    which = chance.randrange(len(frames))
    data = frames[which]
    changed: bytes = change(data, chance.randrange(len(data) + 1))
    return [*frames[:which], changed, *frames[which + 1 :]]


_WAYS: Sequence[Any] = (
    _change_a_value, _change_a_value, _change_a_value, _change_bytes, _cut, _remove_bytes, _insert_bytes, _change_frames
)  # fmt: skip
