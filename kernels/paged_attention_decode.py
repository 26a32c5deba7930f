"""Paged attention of rows with one query token: the keys of a row are split over many programs.

As in Flash-Decoding, each program attends to its share of the keys and a second kernel merges the shares.
All query heads of one KV head share a program, so that a key is read once.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from ._triton import kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl

_MAX_SPLITS = 32
_MIN_KEYS_PER_SPLIT = 256


def paged_attention_decode_triton(
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
    """Fills the rows of out that have exactly one query token. Arguments: see `paged_attention`."""
    n, (_, heads, dim) = seq_lens.shape[0], q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    span = min(max_seq_len, sliding_window) if sliding_window else max_seq_len
    num_splits = _num_splits(n * kv_heads, span, q.device)
    # One value for each share of each head: its weighted sum of V, its largest score, its sum of weights.
    shares = (n, heads, num_splits) if num_splits > 1 else (0, 0, 0)
    partial = torch.empty((*shares, dim), dtype=torch.float32, device=q.device)
    peak, weight = torch.empty((2, *shares), dtype=torch.float32, device=q.device)
    dim_pad = max(next_power_of_2(dim), 16)
    _decode_kernel[(n, kv_heads, num_splits)](
        q, k_cache, v_cache, block_tables, query_start, seq_lens, out, partial, peak, weight,
        scale * 1.4426950408889634, sliding_window, num_splits,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, BLOCK_SIZE=block_size,
        GROUP_PAD=max(next_power_of_2(heads // kv_heads), 16), DIM_PAD=dim_pad,
        BLOCK_N=min(max(16384 // (dim_pad * q.element_size()), 16), 64), SPLIT=num_splits > 1,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if num_splits > 1:
        _merge_kernel[(n, heads)](
            query_start, out, partial, peak, weight, num_splits, heads,
            DIM=dim, DIM_PAD=dim_pad, SPLITS_PAD=_MAX_SPLITS, num_warps=4,
        )  # fmt: skip


def _num_splits(programs: int, span: int, device: torch.device) -> int:
    """Enough to give every multiprocessor four programs, from numbers that the host knows."""
    wanted = 4 * _num_multiprocessors(device) // max(programs, 1)
    return max(1, min(wanted, span // _MIN_KEYS_PER_SPLIT, _MAX_SPLITS))


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    """Without a GPU, under Triton's interpreter, an H100's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@kernel(do_not_specialize=("block_tables", "query_start", "seq_lens", "num_splits", "sliding_window", "table_stride"))
def _decode_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    peak: tl.tensor,
    weight: tl.tensor,
    scale_log2: tl.tensor,
    sliding_window: tl.tensor,
    num_splits: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    cache_block_stride: tl.tensor,
    cache_token_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    table_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start + row).to(tl.int64)
    if tl.load(query_start + row + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + row)
    first = tl.where(sliding_window > 0, tl.maximum(seq_len - sliding_window, 0), 0)
    begin = first // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(seq_len - begin, BLOCK_N), num_splits) * BLOCK_N
    low = begin + split * share
    high = tl.minimum(low + share, seq_len)

    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    d = tl.arange(0, DIM_PAD)
    inside = (member < GROUP)[:, None] & (d < DIM)[None, :]
    query = tl.load(q + token * q_token_stride + head[:, None] * q_head_stride + d[None, :], mask=inside, other=0.0)
    top = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(low, high, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        seen = (position >= first) & (position < high)
        block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        place = block * cache_block_stride + position % BLOCK_SIZE * cache_token_stride + kv_head * cache_head_stride
        wanted = seen[:, None] & (d < DIM)[None, :]
        key = tl.load(k_cache + place[:, None] + d[None, :], mask=wanted, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        score = tl.where(seen[None, :], score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        fade = tl.exp2(top - new_top)
        p = tl.exp2(score - new_top[:, None])
        total = total * fade + tl.sum(p, axis=1)
        value = tl.load(v_cache + place[:, None] + d[None, :], mask=wanted, other=0.0)
        acc = acc * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        top = new_top

    if SPLIT:
        cell = (row * KV_HEADS * GROUP + head) * num_splits + split
        tl.store(partial + cell[:, None] * DIM + d[None, :], acc, mask=inside)
        tl.store(peak + cell, top, mask=member < GROUP)
        tl.store(weight + cell, total, mask=member < GROUP)
    else:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        target = (token * KV_HEADS * GROUP + head)[:, None] * DIM + d[None, :]
        tl.store(out + target, result.to(out.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=("query_start", "num_splits"))
def _merge_kernel(
    query_start: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    peak: tl.tensor,
    weight: tl.tensor,
    num_splits: tl.tensor,
    heads: tl.tensor,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(query_start + row).to(tl.int64)
    if tl.load(query_start + row + 1) - token != 1:
        return
    split = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, DIM_PAD)
    cell = (row * heads + head) * num_splits + split
    valid = split < num_splits
    share_top = tl.load(peak + cell, mask=valid, other=-float("inf"))
    top = tl.max(share_top, axis=0)
    fade = tl.exp2(share_top - tl.where(top > -float("inf"), top, 0.0))
    total = tl.sum(fade * tl.load(weight + cell, mask=valid, other=0.0), axis=0)
    inside = valid[:, None] & (d < DIM)[None, :]
    acc = tl.load(partial + cell[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    result = tl.sum(acc * fade[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + (token * heads + head) * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)
