"""Attention of decode rows on CPU: every query head of a row in one pass, so that its keys and values are read once.

A task is a row and a part of its context. Sixteen keys at a time are scored, weighed by a softmax that is corrected
as its maximum grows, and their values added up. A row in several parts is merged by the thread that ends its last
part, in the order of the parts: results depend neither on threads nor on the other rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._numba import NumbaFunction, NumbaKernel, float_word

if TYPE_CHECKING:
    from . import _numba_language as nl

_PART = 256
_NOTHING = -float("inf")


def paged_attention_decode_numba(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
    sliding_window: int,
    out: torch.Tensor,
) -> None:
    """The rows of one token of paged_attention's batch, into `out` [t, heads, d]; the others are not touched."""
    _, heads, dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    num_rows = seq_lens.shape[0]
    num_parts = -(-max_seq_len // _PART)
    if sliding_window:
        num_parts = min(num_parts, (sliding_window - 1) // _PART + 2)
    parts, ended = q, seq_lens  # one part needs no merging: these are not looked at
    if num_parts > 1:
        # Of each part and head: its sum of values, then its maximum and its sum of weights.
        parts = torch.empty(num_rows * num_parts * heads * (dim + 16))
        ended = torch.zeros(num_rows, dtype=torch.int32)
    words = (
        q.data_ptr(), *q.stride()[:2], k_cache.data_ptr(), v_cache.data_ptr(),
        block_tables.data_ptr(), block_tables.stride(0), query_start.data_ptr(), seq_lens.data_ptr(),
        float_word(scale), sliding_window or max_seq_len, num_parts,
        out.data_ptr(), parts.data_ptr(), ended.data_ptr(), heads, kv_heads,
    )  # fmt: skip
    sizes = {
        "one": 1, "dim": dim, "heads": heads, "row": heads * dim, "group": heads // kv_heads,
        "block_size": block_size, "part": _PART,
    }  # fmt: skip
    work = num_rows * max_seq_len * kv_heads * dim
    _decode_loop.launch(q.dtype, words, num_rows * num_parts, work, sizes)


@NumbaKernel
def _decode_loop(args: nl.Args) -> None:
    query_start, seq_lens = nl.int32s(args, 7), nl.int32s(args, 8)
    window, num_parts = nl.integer(args, 10), nl.integer(args, 11)
    part_size = nl.constant(args, "part")
    queries, total = nl.float32_buffer(args, "row", 1), nl.float32_buffer(args, "row", 1)
    top, weight = nl.float32_buffer(args, "heads", 16), nl.float32_buffer(args, "heads", 16)
    task = nl.next_task(args)
    while task >= 0:
        row, part = task // num_parts, task % num_parts
        token, length = query_start[row], seq_lens[row]
        seen = max(length - window, 0)
        base = seen // part_size
        row_parts = max((length - 1) // part_size - base + 1, 1)
        if query_start[row + 1] - token == 1 and part < row_parts:
            begin = max(seen, (base + part) * part_size)
            end = min(length, (base + part + 1) * part_size)
            _begin(args, token, queries, total, top, weight)
            for first in range(begin // 16 * 16, end, 16):
                _attend_16(args, row, first, begin, end, queries, total, top, weight)
            if row_parts == 1:
                _write(args, token, total, weight)
            else:
                _keep(args, task, total, top, weight)
                if nl.add_and_get(nl.int32s(args, 14), row, 1) == row_parts:
                    _merge(args, row * num_parts, row_parts, token, total, top, weight)
        task = nl.next_task(args)


@NumbaFunction
def _begin(
    args: nl.Args, token: int, queries: nl.Pointer, total: nl.Pointer, top: nl.Pointer, weight: nl.Pointer
) -> None:
    """The token's queries, scaled, and sums over nothing."""
    q, token_stride, head_stride = nl.elements(args, 0), nl.integer(args, 1), nl.integer(args, 2)
    scale, dim = nl.splat(nl.real(args, 9)), nl.constant(args, "dim")
    for head in range(nl.integer(args, 15)):
        nl.store(top, head * 16, nl.splat(_NOTHING))
        nl.store(weight, head * 16, nl.splat(0.0))
        for i in range(0, dim, 16):
            nl.store(queries, head * dim + i, nl.load(q, token * token_stride + head * head_stride + i) * scale)
            nl.store(total, head * dim + i, nl.splat(0.0))


@NumbaFunction
def _attend_16(
    args: nl.Args,
    row: int,
    first: int,
    begin: int,
    end: int,
    queries: nl.Pointer,
    total: nl.Pointer,
    top: nl.Pointer,
    weight: nl.Pointer,
) -> None:
    """Adds keys first .. first + 16 of the row, those between begin and end, to every head's sums."""
    k, v = nl.elements(args, 3), nl.elements(args, 4)
    dim, group = nl.constant(args, "dim"), nl.constant(args, "group")
    places = nl.int64_buffer(args, "one", 16)
    scores, weights = nl.float32_buffer(args, "group", 256), nl.float32_buffer(args, "group", 16)
    shrinks = nl.float32_buffer(args, "group", 16)
    _find(args, row, first, begin, end, places)
    for kv_head in range(nl.integer(args, 16)):
        for key in range(16):
            at = places[key] + kv_head * dim
            for j in range(group):
                score = nl.splat(0.0)
                for i in range(0, dim, 16):
                    score = nl.fma(nl.load(queries, (kv_head * group + j) * dim + i), nl.load(k, at + i), score)
                nl.store(scores, (j * 16 + key) * 16, score)
        for j in range(group):
            head = kv_head * group + j
            score = nl.only_between(nl.sums_of(scores, j * 256), begin - first, end - first, _NOTHING)
            old = nl.load(top, head * 16)
            new = nl.maximum(old, nl.splat(nl.max_of(score)))
            shrink, likely = nl.exp(old - new), nl.exp(score - new)
            nl.store(top, head * 16, new)
            nl.store(weight, head * 16, nl.fma(nl.load(weight, head * 16), shrink, likely))
            nl.store(shrinks, j * 16, shrink)
            nl.store(weights, j * 16, likely)
        for i in range(0, dim, 16):
            for j in range(group):
                at = (kv_head * group + j) * dim + i
                value = nl.load(total, at) * nl.load(shrinks, j * 16)
                for key in range(16):
                    here = nl.load(v, places[key] + kv_head * dim + i)
                    value = nl.fma(nl.splat(weights[j * 16 + key]), here, value)
                nl.store(total, at, value)


@NumbaFunction
def _find(args: nl.Args, row: int, first: int, begin: int, end: int, places: nl.Pointer) -> None:
    """Where 16 keys stand in the cache. A key outside begin .. end is given another's place: what the cache
    holds there is never read, be it NaN. The next keys are asked for already."""
    tables, table, block_size = nl.int32s(args, 5), row * nl.integer(args, 6), nl.constant(args, "block_size")
    width = nl.integer(args, 16) * nl.constant(args, "dim")
    k, v = nl.elements(args, 3), nl.elements(args, 4)
    for key in range(16):
        position = min(max(first + key, begin), end - 1)
        places[key] = (tables[table + position // block_size] * block_size + position % block_size) * width
        ahead = min(first + key + 16, end - 1)
        place = (tables[table + ahead // block_size] * block_size + ahead % block_size) * width
        for i in range(0, width, 32):
            nl.prefetch(k, place + i)
            nl.prefetch(v, place + i)


@NumbaFunction
def _write(args: nl.Args, token: int, total: nl.Pointer, weight: nl.Pointer) -> None:
    """total / weight, zeros for a row without context."""
    out, dim, heads = nl.elements(args, 12), nl.constant(args, "dim"), nl.integer(args, 15)
    for head in range(heads):
        whole = nl.sum_of(nl.load(weight, head * 16))
        share = nl.splat(1.0 / whole if whole > 0 else 0.0)
        for i in range(0, dim, 16):
            nl.store(out, (token * heads + head) * dim + i, nl.load(total, head * dim + i) * share)


@NumbaFunction
def _keep(args: nl.Args, task: int, total: nl.Pointer, top: nl.Pointer, weight: nl.Pointer) -> None:
    parts, dim, heads = nl.float32s(args, 13), nl.constant(args, "dim"), nl.integer(args, 15)
    for head in range(heads):
        at = (task * heads + head) * (dim + 16)
        for i in range(0, dim, 16):
            nl.store(parts, at + i, nl.load(total, head * dim + i))
        parts[at + dim] = top[head * 16]
        parts[at + dim + 1] = nl.sum_of(nl.load(weight, head * 16))


@NumbaFunction
def _merge(
    args: nl.Args,
    first: int,
    count: int,
    token: int,
    total: nl.Pointer,
    top: nl.Pointer,
    weight: nl.Pointer,
) -> None:
    """Parts first .. first + count of a row into its output."""
    parts, dim, heads = nl.float32s(args, 13), nl.constant(args, "dim"), nl.integer(args, 15)
    out, size = nl.elements(args, 12), dim + 16
    for head in range(heads):
        highest = nl.splat(_NOTHING)
        for part in range(first, first + count):
            highest = nl.maximum(highest, nl.splat(parts[(part * heads + head) * size + dim]))
        whole = nl.splat(0.0)
        for i in range(0, dim, 16):
            nl.store(total, head * dim + i, nl.splat(0.0))
        for part in range(first, first + count):
            at = (part * heads + head) * size
            shrink = nl.exp(nl.splat(parts[at + dim]) - highest)
            whole = nl.fma(nl.splat(parts[at + dim + 1]), shrink, whole)
            for i in range(0, dim, 16):
                nl.store(total, head * dim + i, nl.fma(nl.load(parts, at + i), shrink, nl.load(total, head * dim + i)))
        for i in range(0, dim, 16):
            nl.store(out, (token * heads + head) * dim + i, nl.load(total, head * dim + i) / whole)
