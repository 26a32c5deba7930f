"""A small language for CPU kernels: numba's, with vectors of 16 float32 as values. Kernels call this module `nl`.

A kernel is a function of one argument, its launch. It takes tasks (a row, a token) until there are none left, so
that a thread which the system holds up delays the others little:

    task = nl.next_task(args)
    while task >= 0:
        ...
        task = nl.next_task(args)

Tensors are pointers: `nl.load(x, i)` is 16 float32, whatever the type of x's elements. Sizes that a kernel is
compiled for (`nl.constant`) are literals to the compiler, so that short loops over them are unrolled.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 16
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_VERSION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
_FAST = ("reassoc", "contract")

Builder = ir.IRBuilder
Value = ir.Value


# ---- types --------------------------------------------------------------------------------------


class VectorType(types.Type):
    """16 float32."""

    def __init__(self) -> None:
        super().__init__("float32x16")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: VectorType) -> None:
        super().__init__(manager, fe_type, _FLOATS)


class LaunchType(types.Type):
    """A pointer to the launch's int64 words. elements: numba's type of a tensor element. constants: by name."""

    def __init__(self, elements: types.Type, constants: tuple[tuple[str, int], ...]) -> None:
        # Numba keeps compiled kernels on disk by this name and by their own source, not by this file's.
        super().__init__(f"launch({elements}, {constants}, {_VERSION})")
        self.elements = elements
        self.constants = dict(constants)


@register_model(LaunchType)
class _LaunchModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: LaunchType) -> None:
        super().__init__(manager, fe_type, ir.IntType(64).as_pointer())


vector = VectorType()
ELEMENTS = {"bfloat16": types.uint16, "float32": types.float32}


Args = Pointer = Vector = Any
"""A launch, a pointer and 16 float32, in the annotations of kernels."""


# ---- the launch ---------------------------------------------------------------------------------


def _word(builder: Builder, args: Value, index: Value) -> Value:
    """Of the kernel's own words; the next task and the number of tasks stand before them."""
    return builder.gep(args, [builder.add(index, ir.Constant(index.type, 2))], inbounds=True)


@intrinsic
def next_task(typingctx: Any, args: Any) -> Any:
    """A task that no thread has taken, -1 when there is none."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        i64 = ir.IntType(64)
        task = builder.atomic_rmw("add", values[0], ir.Constant(i64, 1), "monotonic")
        num_tasks = builder.load(builder.gep(values[0], [ir.Constant(i64, 1)], inbounds=True))
        return builder.select(builder.icmp_signed("<", task, num_tasks), task, ir.Constant(i64, -1))

    return types.int64(args), build


@intrinsic
def integer(typingctx: Any, args: Any, index: Any) -> Any:
    """Word `index` of the launch."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return builder.load(_word(builder, *values))

    return types.int64(args, index), build


@intrinsic
def real(typingctx: Any, args: Any, index: Any) -> Any:
    """Word `index` of the launch, a `float_word`, as float32."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        double = builder.bitcast(builder.load(_word(builder, *values)), ir.DoubleType())
        return builder.fptrunc(double, ir.FloatType())

    return types.float32(args, index), build


def _pointer(element: Callable[[Any], types.Type]) -> Any:
    @intrinsic
    def pointer(typingctx: Any, args: Any, index: Any) -> Any:
        result = types.CPointer(element(args))

        def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
            address = builder.load(_word(builder, *values))
            return builder.inttoptr(address, context.get_value_type(result))

        return result(args, index), build

    return pointer


elements = _pointer(lambda args: args.elements)
float32s = _pointer(lambda args: types.float32)
int32s = _pointer(lambda args: types.int32)
int64s = _pointer(lambda args: types.int64)


@intrinsic(prefer_literal=True)
def constant(typingctx: Any, args: Any, name: Any) -> Any:
    """A size that the kernel is compiled for."""
    value = args.constants[name.literal_value]

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return ir.Constant(ir.IntType(64), value)

    return types.int64(args, name), build


def _buffer(kind: types.Type) -> Any:
    @intrinsic(prefer_literal=True)
    def buffer(typingctx: Any, args: Any, name: Any, times: Any) -> Any:
        result = types.CPointer(kind)
        size = args.constants[name.literal_value] * times.literal_value

        def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
            pointer = context.get_value_type(result)
            with builder.goto_entry_block():
                memory = builder.alloca(ir.ArrayType(pointer.pointee, size))
            memory.align = 64
            return builder.bitcast(memory, pointer)

        return result(args, name, times), build

    return buffer


float32_buffer = _buffer(types.float32)
int64_buffer = _buffer(types.int64)
"""(args, name, times): memory of this thread, `times` times the constant `name` long, until the kernel returns."""


@intrinsic
def add_and_get(typingctx: Any, counters: Any, index: Any, amount: Any) -> Any:
    """Adds to one of the int32, as one operation among all threads, and returns the sum. What a thread wrote
    before is seen by those that come after."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        added = context.cast(builder, values[2], amount, types.int32)
        counter = builder.gep(values[0], [values[1]], inbounds=True)
        return builder.add(builder.atomic_rmw("add", counter, added, "seq_cst"), added)

    return types.int32(counters, index, amount), build


# ---- memory -------------------------------------------------------------------------------------


def _lanes_at(builder: Builder, pointer: Value, index: Value, lanes: ir.VectorType) -> Value:
    return builder.bitcast(builder.gep(pointer, [index], inbounds=True), lanes.as_pointer())


@intrinsic
def load(typingctx: Any, pointer: Any, index: Any) -> Any:
    """Elements index .. index + 16 as float32."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        if pointer.dtype == types.float32:
            return builder.load(_lanes_at(builder, *values, _FLOATS), align=4)
        bits = builder.load(_lanes_at(builder, *values, _SHORTS), align=2)
        return _from_bfloat16(builder, bits)

    return vector(pointer, index), build


@intrinsic
def store(typingctx: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Elements index .. index + 16, rounded to their type."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> None:
        pointer_value, index_value, floats = values
        if pointer.dtype == types.float32:
            builder.store(floats, _lanes_at(builder, pointer_value, index_value, _FLOATS), align=4)
        else:
            builder.store(
                _to_bfloat16(builder, floats), _lanes_at(builder, pointer_value, index_value, _SHORTS), align=2
            )

    return types.void(pointer, index, value), build


@intrinsic
def rounded(typingctx: Any, pointer: Any, value: Any) -> Any:
    """value as it would read back after a store to `pointer`."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        if pointer.dtype == types.float32:
            return values[1]
        return _from_bfloat16(builder, _to_bfloat16(builder, values[1]))

    return vector(pointer, value), build


def _from_bfloat16(builder: Builder, bits: Value) -> Value:
    wide = builder.shl(builder.zext(bits, _INTS), _same(_INTS, 16))
    return builder.bitcast(wide, _FLOATS)


def _to_bfloat16(builder: Builder, floats: Value) -> Value:
    """To the nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(floats, _INTS)
    odd = builder.and_(builder.lshr(bits, _same(_INTS, 16)), _same(_INTS, 1))
    nearest = builder.lshr(builder.add(builder.add(bits, _same(_INTS, 0x7FFF)), odd), _same(_INTS, 16))
    is_nan = builder.fcmp_unordered("uno", floats, floats)
    return builder.trunc(builder.select(is_nan, _same(_INTS, 0x7FC0), nearest), _SHORTS)


def _same(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


# ---- arithmetic ---------------------------------------------------------------------------------


def _operator(op: Any, instruction: str) -> None:
    @infer_global(op)
    class Template(ConcreteTemplate):
        cases = [signature(vector, vector, vector)]

    @lower_builtin(op, vector, vector)
    def lower(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return getattr(builder, instruction)(*values)


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


def _call(builder: Builder, name: str, kind: ir.Type, values: list[Value], fast: tuple[str, ...] = ()) -> Value:
    function_type = ir.FunctionType(kind, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, values, fastmath=fast)


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """A float in all lanes."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return _spread(builder, context.cast(builder, values[0], value, types.float32))

    return vector(value), build


def _spread(builder: Builder, scalar: Value) -> Value:
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTS, [0] * LANES))


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return _call(builder, "llvm.fma.v16f32", _FLOATS, values)

    return vector(a, b, c), build


@intrinsic
def maximum(typingctx: Any, a: Any, b: Any) -> Any:
    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return _call(builder, "llvm.maxnum.v16f32", _FLOATS, values)

    return vector(a, b), build


@intrinsic
def sum_of(typingctx: Any, a: Any) -> Any:
    """Over the lanes, in an order that does not change from call to call."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        zero = ir.Constant(ir.FloatType(), 0.0)
        return _call(builder, "llvm.vector.reduce.fadd.v16f32", ir.FloatType(), [zero, *values], _FAST)

    return types.float32(a), build


@intrinsic
def max_of(typingctx: Any, a: Any) -> Any:
    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return _call(builder, "llvm.vector.reduce.fmax.v16f32", ir.FloatType(), values)

    return types.float32(a), build


@intrinsic
def only_between(typingctx: Any, value: Any, first: Any, end: Any, other: Any) -> Any:
    """value in lanes first .. end (integers, may lie outside 0 .. 16), other in the others."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        floats, low, high, outside = values
        lane = ir.Constant(_INTS, list(range(LANES)))

        def every(number: Value, kind: Any) -> Value:
            number = builder.trunc(context.cast(builder, number, kind, types.int64), ir.IntType(32))
            one = builder.insert_element(ir.Constant(_INTS, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
            return builder.shuffle_vector(one, ir.Constant(_INTS, ir.Undefined), ir.Constant(_INTS, [0] * LANES))

        inside = builder.and_(
            builder.icmp_signed(">=", lane, every(low, first)), builder.icmp_signed("<", lane, every(high, end))
        )
        return builder.select(inside, floats, _spread(builder, context.cast(builder, outside, other, types.float32)))

    return vector(value, first, end, other), build


@intrinsic
def exp(typingctx: Any, a: Any) -> Any:
    """e to the a, within 2 units in the last place; 0 below -87, infinity above 88.3."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return _exp(builder, values[0])

    return vector(a), build


def _exp(builder: Builder, x: Value) -> Value:
    """2^n * e^r with |r| <= ln 2 / 2, by a polynomial (Cephes' expf)."""

    def const(value: float) -> ir.Constant:
        return _same(_FLOATS, float(np.float32(value)))

    def multiply_add(a: Value, b: Value, c: Value) -> Value:
        return _call(builder, "llvm.fma.v16f32", _FLOATS, [a, b, c])

    kept = _call(builder, "llvm.minnum.v16f32", _FLOATS, [x, const(89.0)])
    n = _call(builder, "llvm.rint.v16f32", _FLOATS, [builder.fmul(kept, const(1.44269504088896341))])
    r = multiply_add(n, const(-0.693359375), kept)
    r = multiply_add(n, const(2.12194440e-4), r)
    power = const(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        power = multiply_add(power, r, const(factor))
    power = multiply_add(power, builder.fmul(r, r), builder.fadd(r, const(1.0)))
    exponent = builder.shl(builder.add(builder.fptosi(n, _INTS), _same(_INTS, 127)), _same(_INTS, 23))
    scaled = builder.fmul(power, builder.bitcast(exponent, _FLOATS))
    return builder.select(builder.fcmp_ordered("<", x, const(-87.0)), const(0.0), scaled)


@intrinsic
def sums_of(typingctx: Any, pointer: Any, index: Any) -> Any:
    """Lane t is the sum of the 16 float32 from index + 16 * t on: one tree for 16 sums."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        pointer_value, index_value = values
        rows = []
        for row in range(LANES):
            place = builder.add(index_value, ir.Constant(index_value.type, row * LANES))
            rows.append(builder.load(_lanes_at(builder, pointer_value, place, _FLOATS), align=4))
        even, odd = (ir.Constant(_INTS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
        while len(rows) > 1:
            pairs = zip(rows[::2], rows[1::2], strict=True)
            rows = [
                builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd)) for a, b in pairs
            ]
        return rows[0]

    return vector(pointer, index), build


@intrinsic
def prefetch(typingctx: Any, pointer: Any, index: Any) -> Any:
    """Asks for the cache line of an element that will be read soon."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> None:
        byte = ir.IntType(8).as_pointer()
        place = builder.bitcast(builder.gep(values[0], [values[1]]), byte)
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = (ir.Constant(i32, v) for v in (0, 3, 1))
        builder.call(function, [place, read, keep, data])

    return types.void(pointer, index), build
