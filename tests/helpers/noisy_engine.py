"""An engine core that sends rubbish between its messages."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import zmq

from mutations import one_odd_value
from stepahead.engine_core.messages import EngineInfo, EngineMessage, FinishedRequest, OutputBatch
from stepahead.engine_core.process import EngineStart
from stepahead.worker.codec import Codec, CodecError

RUBBISH = (
    [b""],
    [b"\xc1"],
    [b"\x93\x01\x02\x03", b"x"],
    [b"a", b"b", b"c"],
    [msgspec.msgpack.encode([3, ["<i8", [2**30], 0], ["<i4", [1], 0], ["<i4", [1], 0]]), b"short"],
    [msgspec.msgpack.encode([3, ["|O", [1], 0], ["<i4", [1], 0], ["<i4", [1], 0]]), b"12345678"],
    [msgspec.msgpack.encode([99, 1, 2])],
    [os.urandom(200), os.urandom(200)],
)


def main(message: bytes) -> int:
    start = msgspec.msgpack.decode(message, type=EngineStart)
    codec: Codec[EngineMessage] = Codec(EngineMessage)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inputs, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inputs.connect(start.inputs)
    outputs.connect(start.outputs)
    info = EngineInfo(
        pid=os.getpid(),
        worker_pids=[],
        device="none",
        num_kv_blocks=1,
        block_size=16,
        max_model_len=16,
        max_model_len_from="the model",
        async_scheduling=False,
        async_reason="",
    )
    ids, counts, tokens = np.array([7]), np.array([3], np.int32), np.array([1, 2, 3], np.int32)
    for frames in one_odd_value("client outputs"):
        try:
            codec.decode(frames)
        except CodecError:
            outputs.send_multipart(frames)
    for real in (info, OutputBatch(ids, counts, tokens, [FinishedRequest(7, "length")])):
        for rubbish in RUBBISH:
            outputs.send_multipart(rubbish)
        outputs.send_multipart(codec.encode(real))
    inputs.recv_multipart()  # Stop
    context.destroy()
    return 0
