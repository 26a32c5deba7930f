"""Structs to bytes and back: MessagePack for the struct, one raw frame for all its arrays.

A message is a list of frames: [struct] or [struct, arrays]. In the struct, an array is the header
(dtype, shape, offset); its bytes lie at that offset of the arrays frame. Headers come from the
network, so each is checked against an allow-list and the frame's true length before it is believed.
No pickle is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from ..errors import StepaheadError

T = TypeVar("T")

_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, ("<i4", "<i8", "<u4", "<f4", "|b1", "|u1"))}
_ALIGN = 8
_MAX_DIMS = 4
_MARGIN = 60
"""Levels of nesting that a message, and a reader whose stack is deeper, may add to a plain value."""


class CodecError(StepaheadError, ValueError):
    """Bytes from a socket that are not a message of the expected type."""


class Codec(Generic[T]):
    """Encodes and decodes one message type. An instance belongs to one thread."""

    def __init__(self, message_type: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._pack)
        self._decoder = msgspec.msgpack.Decoder(message_type, dec_hook=self._unpack)
        self._chunks: list[bytes] = []
        self._offset = 0
        self._frame: memoryview | None = None

    def encode(self, message: T) -> list[bytes]:
        self._chunks, self._offset = [], 0
        head = self._encoder.encode(message)
        return [head, b"".join(self._chunks)] if self._chunks else [head]

    def decode(self, frames: Sequence[bytes | memoryview]) -> T:
        """Raises: CodecError."""
        if not 1 <= len(frames) <= 2:
            raise CodecError(f"expected 1 or 2 frames, got {len(frames)}")
        self._frame = memoryview(frames[1]) if len(frames) == 2 else memoryview(b"")
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise CodecError(f"not a valid message: {error}") from error
        finally:
            self._frame = None

    def _pack(self, value: Any) -> tuple[str, tuple[int, ...], int]:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot send a {type(value).__name__}: only plain values and numpy arrays travel")
        code = value.dtype.str
        if code not in _DTYPES:
            raise TypeError(f"cannot send an array of {value.dtype}")
        offset = self._offset
        data = value.tobytes()
        if data:
            padding = -len(data) % _ALIGN
            self._chunks.append(data + b"\0" * padding if padding else data)
            self._offset = offset + len(data) + padding
        return code, value.shape, offset

    def _unpack(self, expected: type, header: Any) -> Any:
        if expected is not np.ndarray:
            raise ValueError(f"unexpected type {expected!r}")
        code, shape, offset = header
        dtype = _DTYPES.get(code)
        if dtype is None:
            raise ValueError(f"dtype {code!r} is not allowed")
        if len(shape) > _MAX_DIMS or not all(type(d) is int and 0 <= d < 2**31 for d in shape):
            raise ValueError(f"bad array shape {shape!r}")
        count = 1
        for extent in shape:
            count *= extent
        if type(offset) is not int or offset < 0 or offset % _ALIGN:
            raise ValueError(f"bad array offset {offset!r}")
        assert self._frame is not None
        if offset + count * dtype.itemsize > self._frame.nbytes:
            raise ValueError(
                f"an array of {shape!r} {code} at {offset} exceeds the frame of {self._frame.nbytes} bytes"
            )
        if count == 0:
            return np.empty(tuple(shape), dtype)
        return np.frombuffer(self._frame, dtype, count, offset).reshape(tuple(shape))


def require_plain(value: Any, what: str) -> None:
    """Raises: TypeError when `value`, at a place typed Any, would not survive the way: only None, bool, int, float,
    str, bytes, and lists and dicts of them do (tuples arrive as lists)."""
    nested = value
    for _ in range(_MARGIN):
        nested = [nested]
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(nested))  # dict keys, say, may go and not come back
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"{what} cannot travel between processes: {error}; make it of plain Python values") from None
