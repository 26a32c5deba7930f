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
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core.typing import signature
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import lower_builtin, models, register_model

from . import _numba_ir as vectors
from . import _numba_tiles as tiles
from ._numba_ir import FLOAT, FLOATS, INT32, INT64, INTS, LANES, SHORTS, Builder, Value, intrinsic

_SOURCES = __file__, vectors.__file__, tiles.__file__
_VERSION = hashlib.sha256(b"".join(Path(source).read_bytes() for source in _SOURCES)).hexdigest()[:16]


# ---- types --------------------------------------------------------------------------------------


class VectorType(types.Type):
    """16 float32."""

    def __init__(self) -> None:
        super().__init__("float32x16")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: VectorType) -> None:
        super().__init__(manager, fe_type, FLOATS)


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
        super().__init__(manager, fe_type, INT64.as_pointer())


vector = VectorType()
ELEMENTS = {"bfloat16": types.uint16, "float32": types.float32}


Args: TypeAlias = Any
Pointer: TypeAlias = Any
Vector: TypeAlias = Any
"""A launch, a pointer and 16 float32, in the annotations of kernels."""


# ---- the launch ---------------------------------------------------------------------------------


def _word(builder: Builder, args: Value, index: Value) -> Value:
    """Of the kernel's own words; the next task and the number of tasks stand before them."""
    return builder.gep(args, [builder.add(index, ir.Constant(index.type, 2))], inbounds=True)


@intrinsic
def next_task(typingctx: Any, args: Any) -> Any:
    """A task that no thread has taken, -1 when there is none."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        i64 = INT64
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
        double = builder.bitcast(builder.load(_word(builder, *values)), vectors.DOUBLE)
        return builder.fptrunc(double, FLOAT)

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
        return ir.Constant(INT64, value)

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


@intrinsic
def load(typingctx: Any, pointer: Any, index: Any) -> Any:
    """Elements index .. index + 16 as float32."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        pointer_value, index_value = values
        if pointer.dtype == types.float32:
            return builder.load(vectors.lanes_at(builder, pointer_value, index_value, FLOATS), align=4)
        bits = builder.load(vectors.lanes_at(builder, pointer_value, index_value, SHORTS), align=2)
        return vectors.from_bfloat16(builder, bits)

    return vector(pointer, index), build


@intrinsic
def store(typingctx: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Elements index .. index + 16, rounded to their type."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> None:
        pointer_value, index_value, floats = values
        if pointer.dtype == types.float32:
            builder.store(floats, vectors.lanes_at(builder, pointer_value, index_value, FLOATS), align=4)
        else:
            builder.store(
                vectors.to_bfloat16(builder, floats),
                vectors.lanes_at(builder, pointer_value, index_value, SHORTS),
                align=2,
            )

    return types.void(pointer, index, value), build


@intrinsic
def rounded(typingctx: Any, pointer: Any, value: Any) -> Any:
    """value as it would read back after a store to `pointer`."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        if pointer.dtype == types.float32:
            return values[1]
        return vectors.from_bfloat16(builder, vectors.to_bfloat16(builder, values[1]))

    return vector(pointer, value), build


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


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """A float in all lanes."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return vectors.spread(builder, context.cast(builder, values[0], value, types.float32))

    return vector(value), build


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return vectors.call(builder, "llvm.fma.v16f32", FLOATS, values)

    return vector(a, b, c), build


@intrinsic
def maximum(typingctx: Any, a: Any, b: Any) -> Any:
    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return vectors.call(builder, "llvm.maxnum.v16f32", FLOATS, values)

    return vector(a, b), build


@intrinsic
def sum_of(typingctx: Any, a: Any) -> Any:
    """Over the lanes, in an order that does not change from call to call."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        # "reassoc" allows a tree; which one is LLVM's choice when the kernel is compiled.
        zero = ir.Constant(FLOAT, 0.0)
        return vectors.call(builder, "llvm.vector.reduce.fadd.v16f32", FLOAT, [zero, *values], ("reassoc",))

    return types.float32(a), build


@intrinsic
def max_of(typingctx: Any, a: Any) -> Any:
    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return vectors.call(builder, "llvm.vector.reduce.fmax.v16f32", FLOAT, values)

    return types.float32(a), build


@intrinsic
def first_of(typingctx: Any, a: Any, value: Any) -> Any:
    """The first lane that equals value; 16 when none does."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        other = vectors.spread(builder, context.cast(builder, values[1], value, types.float32))
        equal = builder.bitcast(builder.fcmp_ordered("==", values[0], other), ir.IntType(LANES))
        found = builder.or_(builder.zext(equal, INT64), ir.Constant(INT64, 1 << LANES))
        return builder.cttz(found, ir.Constant(ir.IntType(1), 0))

    return types.int64(a, value), build


@intrinsic
def only_between(typingctx: Any, value: Any, first: Any, end: Any, other: Any) -> Any:
    """value in lanes first .. end (integers, may lie outside 0 .. 16), other in the others."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        floats, low, high, outside = values
        lane = ir.Constant(INTS, list(range(LANES)))

        def every(number: Value, kind: Any) -> Value:
            return vectors.spread(builder, builder.trunc(context.cast(builder, number, kind, types.int64), INT32))

        inside = builder.and_(
            builder.icmp_signed(">=", lane, every(low, first)), builder.icmp_signed("<", lane, every(high, end))
        )
        return builder.select(
            inside, floats, vectors.spread(builder, context.cast(builder, outside, other, types.float32))
        )

    return vector(value, first, end, other), build


@intrinsic
def exp(typingctx: Any, a: Any) -> Any:
    """e to the a, within 2 units in the last place; 0 below -87, infinity above 88.3."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        return vectors.exp(builder, values[0])

    return vector(a), build


@intrinsic
def silu(typingctx: Any, a: Any) -> Any:
    """a / (1 + e^-a)"""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        zero, one = (vectors.same(FLOATS, value) for value in (0.0, 1.0))
        power = vectors.exp(builder, builder.fsub(zero, values[0]))
        return builder.fdiv(values[0], builder.fadd(one, power))

    return vector(a), build


@intrinsic
def sums_of(typingctx: Any, pointer: Any, index: Any) -> Any:
    """Lane t is the sum of the 16 float32 from index + 16 * t on: one tree for 16 sums."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> Value:
        pointer_value, index_value = values
        rows = []
        for row in range(LANES):
            place = builder.add(index_value, ir.Constant(index_value.type, row * LANES))
            rows.append(builder.load(vectors.lanes_at(builder, pointer_value, place, FLOATS), align=4))
        return vectors.sum_tree(builder, rows)

    return vector(pointer, index), build


@intrinsic
def prefetch(typingctx: Any, pointer: Any, index: Any) -> Any:
    """Asks for the cache line of an element that will be read soon."""

    def build(context: Any, builder: Builder, sig: Any, values: list[Value]) -> None:
        place = builder.bitcast(builder.gep(values[0], [values[1]]), ir.IntType(8).as_pointer())
        read, keep, data = (ir.Constant(INT32, flag) for flag in (0, 3, 1))
        vectors.call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, read, keep, data])

    return types.void(pointer, index), build
