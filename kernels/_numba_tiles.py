"""The tile registers of x86's AMX, `nl.tiles` in kernels: eight matrices of up to 16 rows of 64 bytes.

A tile's number is a literal. How many rows each has is the thread's own state, set by `config`, and given back by
`release` before a kernel returns.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ._numba_ir import INT64, Builder, Value, call, intrinsic

_INT8 = ir.IntType(8)
_BYTES = _INT8.as_pointer()
_VOID = ir.VoidType()
_PALETTE = 1
_ROW_BYTES = 0x0040_0040_0040_0040  # 64 each, of four tiles
_ROWS = 0x01_00_00_01_01  # bytes of tiles 0, 1 and 4
_MORE_ROWS = 0x01_00_01_01_00_00  # 2, 3 and 5
_WEIGHT_ROWS = 0x10_10 << 48  # 6 and 7


def _tile(number: Any) -> Value:
    return ir.Constant(_INT8, number.literal_value)


def _bytes_at(builder: Builder, pointer: Value, index: Value) -> Value:
    return builder.bitcast(builder.gep(pointer, [index]), _BYTES)


@intrinsic
def config(typingctx: Any, words: Any, rows: Any, more_rows: Any) -> Any:
    """Tiles 0, 1 and 4 get `rows` rows, 2, 3 and 5 get `more_rows`, 6 and 7 get 16. words: an int64_buffer of 8."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> None:
        buffer, some, more = values
        sizes = ir.Constant(INT64, _WEIGHT_ROWS)
        for count, kind, places in ((some, rows, _ROWS), (more, more_rows, _MORE_ROWS)):
            count = context.cast(builder, count, kind, types.int64)
            sizes = builder.add(sizes, builder.mul(count, ir.Constant(INT64, places)))
        layout = {0: ir.Constant(INT64, _PALETTE), 6: sizes}
        layout |= {word: ir.Constant(INT64, _ROW_BYTES) for word in (2, 3)}
        for word in range(8):
            place = builder.gep(buffer, [ir.Constant(INT64, word)])
            builder.store(layout.get(word, ir.Constant(INT64, 0)), place)
        call(builder, "llvm.x86.ldtilecfg", _VOID, [builder.bitcast(buffer, _BYTES)])

    return types.void(words, rows, more_rows), build


@intrinsic
def release(typingctx: Any) -> Any:
    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> None:
        call(builder, "llvm.x86.tilerelease", _VOID, [])

    return types.void(), build


@intrinsic(prefer_literal=True)
def zero(typingctx: Any, tile: Any) -> Any:
    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> None:
        call(builder, "llvm.x86.tilezero", _VOID, [_tile(tile)])

    return types.void(tile), build


def _move(name: str) -> Any:
    @intrinsic(prefer_literal=True)
    def move(typingctx: Any, tile: Any, pointer: Any, index: Any, stride: Any) -> Any:
        def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> None:
            _, pointer_value, index_value, stride_value = values
            apart = context.cast(builder, stride_value, sig.args[3], types.int64)
            call(builder, name, _VOID, [_tile(tile), _bytes_at(builder, pointer_value, index_value), apart])

        return types.void(tile, pointer, index, stride), build

    return move


load = _move("llvm.x86.tileloadd64")
store = _move("llvm.x86.tilestored64")
"""(tile, pointer, index, stride): rows of 64 bytes from element `index` on, each `stride` bytes after the last."""


@intrinsic(prefer_literal=True)
def dot(typingctx: Any, total: Any, a: Any, b: Any) -> Any:
    """total (float32 [rows, 16]) += a (bfloat16 [rows, 32]) times b (bfloat16 [16, 16, 2]: a pair of rows of a matrix
    [32, 16], column by column), summed in float32."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> None:
        call(builder, "llvm.x86.tdpbf16ps", _VOID, [_tile(total), _tile(a), _tile(b)])

    return types.void(total, a, b), build


@intrinsic
def store_pair(typingctx: Any, pointer: Any, index: Any, low: Any, high: Any) -> Any:
    """Two vectors as 32 bfloat16 from element `index` on, rounded to the nearest; denormals become 0."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> None:
        pointer_value, index_value, first, second = values
        shorts = ir.VectorType(ir.IntType(16), 32)
        rounded = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", shorts, [second, first])
        place = builder.bitcast(builder.gep(pointer_value, [index_value]), shorts.as_pointer())
        builder.store(rounded, place, align=2)

    return types.void(pointer, index, low, high), build
