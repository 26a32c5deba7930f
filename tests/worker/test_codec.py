"""Messages survive the way, and bytes that are no message are refused, never believed."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from stepahead.worker.codec import Codec, CodecError, require_plain
from stepahead.worker.messages import CallReply, ExecuteModel, NewRequest, SamplingOptions, StepPlan, WorkerRpc


class Arrays(msgspec.Struct, array_like=True):
    arrays: list[np.ndarray]
    name: str = ""


DTYPES = st.sampled_from(["<i4", "<i8", "<u4", "<f4", "|b1", "|u1"]).map(np.dtype)
ANY_ARRAY = DTYPES.flatmap(lambda dtype: st_np.arrays(dtype, st_np.array_shapes(min_dims=0, max_dims=4, min_side=0)))


@given(st.lists(ANY_ARRAY, max_size=5), st.text(max_size=5))
def test_arrays_of_any_shape_survive(arrays: list[np.ndarray], name: str) -> None:
    codec: Codec[Arrays] = Codec(Arrays)
    back = codec.decode(codec.encode(Arrays(arrays, name)))
    assert back.name == name
    for sent, received in zip(arrays, back.arrays, strict=True):
        assert received.dtype == sent.dtype
        assert received.shape == sent.shape
        assert received.tobytes() == sent.tobytes()


def test_a_view_with_strides_arrives_as_what_it_shows() -> None:
    codec: Codec[Arrays] = Codec(Arrays)
    view = np.arange(24, dtype=np.int32).reshape(4, 6)[::2, 1::2]
    assert codec.decode(codec.encode(Arrays([view]))).arrays[0].tolist() == view.tolist()


@pytest.mark.parametrize("value", [np.zeros(2, ">i4"), np.zeros(2, np.float64), np.array(["a"]), np.zeros(1, object)])
def test_other_kinds_of_arrays_do_not_leave(value: np.ndarray) -> None:
    with pytest.raises(TypeError, match="cannot send an array"):
        Codec(Arrays).encode(Arrays([value]))


def plan() -> ExecuteModel:
    int32 = np.arange(3, dtype=np.int32)
    new = NewRequest(1, int32, 2, 0, int32, SamplingOptions(seed=2**63 - 1, logit_bias={3: -1.5}))
    return ExecuteModel(StepPlan(7, [new], int32, int32, int32, int32, int32, int32 > 0, int32[:0], 9))


@pytest.mark.parametrize(
    ("code", "shape", "offset"),
    [
        ("<i4", [5], 0),
        ("<i4", [2**31 - 1, 2**31 - 1, 2**31 - 1], 0),
        ("<i4", [-1], 0),
        ("<i4", [1.5], 0),
        ("<i4", [True], 0),
        ("<i4", [1], 4),
        ("<i4", [1], -8),
        ("<i4", [1], 2**63),
        ("<i4", [1] * 5, 0),
        ("|O", [1], 0),
        ("<f8", [1], 0),
        (3, [1], 0),
        ("<i4", "1", 0),
        (["<i4"], [1], 0),
    ],
)
def test_a_header_is_checked_against_the_frame(code: object, shape: object, offset: object) -> None:
    head = msgspec.msgpack.Encoder(enc_hook=str).encode([[[code, shape, offset]], ""])
    with pytest.raises(CodecError):
        Codec(Arrays).decode([head, b"\0" * 16])


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_random_bytes_are_refused(frames: list[bytes]) -> None:
    try:
        Codec(WorkerRpc).decode(frames)
    except CodecError:
        return
    assert Codec(WorkerRpc).encode(Codec(WorkerRpc).decode(frames))[0] == frames[0]


@given(st.data())
def test_a_message_with_a_changed_byte_is_refused_or_still_a_message(data: st.DataObject) -> None:
    codec: Codec[WorkerRpc] = Codec(WorkerRpc)
    frames = [bytearray(frame) for frame in codec.encode(plan())]
    frame = data.draw(st.sampled_from(frames))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = codec.decode(frames)
    except CodecError:
        return
    assert codec.encode(message)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(CodecError):
        Codec(WorkerRpc).decode([b"\x91" * 100_000])


def test_plain_values_are_told_from_others() -> None:
    require_plain({"a": [1, 2.5, None, b"x", "y", True]}, "this")
    with pytest.raises(TypeError, match="this cannot travel"):
        require_plain(object(), "this")


@dataclasses.dataclass(frozen=True)
class Key:
    number: int


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [{Key(1): 2}, msgspec.Raw(b"\xc1"), nested(100_000), "\udc80", {1 << 70: 1}])
def test_what_would_go_but_not_come_back_is_no_plain_value(value: Any) -> None:
    with pytest.raises(TypeError, match="this cannot travel"):
        require_plain(value, "this")


def test_a_plain_value_of_any_depth_survives_the_way_in_a_message() -> None:
    codec: Codec[CallReply] = Codec(CallReply)
    for depth in [*range(850, 1010, 10), 5_000, 20_000]:
        with contextlib.suppress(TypeError):
            require_plain(nested(depth), "this")
            assert codec.decode(codec.encode(CallReply(1, 0, nested(depth)))).call_id == 1
