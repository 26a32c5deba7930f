"""LLVM code for vectors of 16 float32, which `_numba_language.py` gives names to."""

from __future__ import annotations

from typing import Any, TypeAlias

import numba.extending
import numpy as np
from llvmlite import ir
from numba.core import cgutils

Builder: TypeAlias = Any
Value: TypeAlias = Any
"""llvmlite's IRBuilder and Value."""

intrinsic: Any = numba.extending.intrinsic
"""An operation that kernels call. Its function gets the types of the arguments, and returns the operation's signature
and what builds its LLVM code. Any, because a kernel does not give it the typing context."""

LANES = 16
FLOAT, DOUBLE = ir.FloatType(), ir.DoubleType()
INT32, INT64 = ir.IntType(32), ir.IntType(64)
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT32, LANES)
SHORTS = ir.VectorType(ir.IntType(16), LANES)


def same(kind: ir.VectorType, value: float) -> Value:
    """A constant in all lanes."""
    return ir.Constant(kind, [value] * LANES)


def spread(builder: Builder, scalar: Value) -> Value:
    """A float or int32 in all lanes."""
    kind = ir.VectorType(scalar.type, LANES)
    unknown = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(unknown, scalar, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, unknown, same(INTS, 0))


def call(builder: Builder, name: str, result: ir.Type, values: list[Value], fast: tuple[str, ...] = ()) -> Value:
    """One of LLVM's intrinsic functions."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values, fastmath=fast)


def lanes_at(builder: Builder, pointer: Value, index: Value, lanes: ir.VectorType) -> Value:
    """A pointer to the 16 elements from index on."""
    return builder.bitcast(builder.gep(pointer, [index], inbounds=True), lanes.as_pointer())


def from_bfloat16(builder: Builder, bits: Value) -> Value:
    wide = builder.shl(builder.zext(bits, INTS), same(INTS, 16))
    return builder.bitcast(wide, FLOATS)


def to_bfloat16(builder: Builder, floats: Value) -> Value:
    """To the nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(floats, INTS)
    odd = builder.and_(builder.lshr(bits, same(INTS, 16)), same(INTS, 1))
    nearest = builder.lshr(builder.add(builder.add(bits, same(INTS, 0x7FFF)), odd), same(INTS, 16))
    is_nan = builder.fcmp_unordered("uno", floats, floats)
    return builder.trunc(builder.select(is_nan, same(INTS, 0x7FC0), nearest), SHORTS)


def sum_tree(builder: Builder, rows: list[Value]) -> Value:
    """16 vectors to one: lane t is the sum of vector t. Neighbours are added, and both halves of a pair of vectors
    go on as one vector."""
    even, odd = (ir.Constant(INTS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
    while len(rows) > 1:
        pairs = zip(rows[::2], rows[1::2], strict=True)
        rows = [builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd)) for a, b in pairs]
    return rows[0]


def exp(builder: Builder, x: Value) -> Value:
    """2^n * e^r with |r| <= ln 2 / 2, e^r by a polynomial (Cephes' expf). n = 128 makes the factor infinite."""

    def const(value: float) -> Value:
        return same(FLOATS, float(np.float32(value)))

    def multiply_add(a: Value, b: Value, c: Value) -> Value:
        return call(builder, "llvm.fma.v16f32", FLOATS, [a, b, c])

    kept = call(builder, "llvm.minnum.v16f32", FLOATS, [x, const(89.0)])
    kept = call(builder, "llvm.maxnum.v16f32", FLOATS, [kept, const(-89.0)])
    n = call(builder, "llvm.rint.v16f32", FLOATS, [builder.fmul(kept, const(1.44269504088896341))])
    r = multiply_add(n, const(-0.693359375), kept)
    r = multiply_add(n, const(2.12194440e-4), r)
    power = const(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        power = multiply_add(power, r, const(factor))
    power = multiply_add(power, builder.fmul(r, r), builder.fadd(r, const(1.0)))
    exponent = builder.shl(builder.add(builder.fptosi(n, INTS), same(INTS, 127)), same(INTS, 23))
    scaled = builder.fmul(power, builder.bitcast(exponent, FLOATS))
    return builder.select(builder.fcmp_ordered("<", x, const(-87.0)), const(0.0), scaled)
