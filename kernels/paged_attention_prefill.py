"""Paged attention of rows with several query tokens: a tile of them attends to tiles of keys.

A tile holds BLOCK_Q tokens times the query heads of one KV head, so that a key is read once for the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._triton import kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl


def paged_attention_prefill_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int,
    out: torch.Tensor,
) -> None:
    """Fills the rows of out that have more than one query token. Arguments: see `paged_attention`."""
    num_tokens, heads, dim = q.shape
    n, (_, block_size, kv_heads, _) = seq_lens.shape[0], k_cache.shape
    group = heads // kv_heads
    dim_pad = max(next_power_of_2(dim), 16)
    block_m, block_n, num_warps = _tile(dim_pad, q.element_size())
    block_m = max(block_m, next_power_of_2(group))
    block_q = block_m // group
    # Row i's tiles begin at query_start[i] // block_q + i: room for each row's last, partly filled tile.
    _prefill_kernel[(num_tokens // block_q + n, kv_heads)](
        q, k_cache, v_cache, block_tables, query_start, seq_lens, out,
        scale * 1.4426950408889634, sliding_window, n,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_tables.stride(0),
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, BLOCK_SIZE=block_size,
        DIM_PAD=dim_pad, BLOCK_M=block_m, BLOCK_Q=block_q, BLOCK_N=block_n, num_warps=num_warps, num_stages=2,
    )  # fmt: skip


def _tile(dim_pad: int, element_size: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, warps): tiles that fit the registers and 99 KiB of shared memory.

    float32 runs without tensor cores, exactly, and needs more registers for the same tile.
    """
    if element_size == 4:
        return (32, 32, 8) if dim_pad <= 128 else (16, 16, 8)
    return (128, 64, 8) if dim_pad <= 128 else (64, 32, 4)


@kernel(do_not_specialize=("block_tables", "query_start", "seq_lens", "num_rows", "sliding_window", "table_stride"))
def _prefill_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_tables: tl.tensor,
    query_start: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    scale_log2: tl.tensor,
    sliding_window: tl.tensor,
    num_rows: tl.tensor,
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
    DIM_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _row_of_tile(tile, query_start, num_rows, BLOCK_Q)
    row_start = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - row_start
    tile_start = (tile - (row_start // BLOCK_Q + row)) * BLOCK_Q
    if tile_start >= query_len or query_len == 1:
        return
    seq_len = tl.load(seq_lens + row)
    computed = seq_len - query_len
    high = tl.minimum(computed + tile_start + BLOCK_Q, seq_len)
    window = tl.where(sliding_window > 0, sliding_window, seq_len)
    first = tl.maximum(computed + tile_start + 1 - window, 0)

    m = tl.arange(0, BLOCK_M)
    query_index = tile_start + m // GROUP
    query_position = computed + query_index
    head = kv_head * GROUP + m % GROUP
    token = (row_start + query_index).to(tl.int64)
    d = tl.arange(0, DIM_PAD)
    inside = ((m < BLOCK_Q * GROUP) & (query_index < query_len))[:, None] & (d < DIM)[None, :]
    source = token * q_token_stride + head * q_head_stride
    query = tl.load(q + source[:, None] + d[None, :], mask=inside, other=0.0)
    table = block_tables + row.to(tl.int64) * table_stride
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    for start in range(first // BLOCK_N * BLOCK_N, high, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        stored = (position >= first) & (position < high)
        block = tl.load(table + position // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
        place = block * cache_block_stride + position % BLOCK_SIZE * cache_token_stride + kv_head * cache_head_stride
        wanted = stored[:, None] & (d < DIM)[None, :]
        key = tl.load(k_cache + place[:, None] + d[None, :], mask=wanted, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        behind = query_position[:, None] - position[None, :]
        score = tl.where(stored[None, :] & (behind >= 0) & (behind < window), score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        # A query may see nothing in the window's first tile: its top stays -inf, and -inf - -inf is NaN.
        base = tl.where(new_top > -float("inf"), new_top, 0.0)
        fade = tl.exp2(top - base)
        p = tl.exp2(score - base[:, None])
        total = total * fade + tl.sum(p, axis=1)
        value = tl.load(v_cache + place[:, None] + d[None, :], mask=wanted, other=0.0)
        acc = acc * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
        top = new_top

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    target = (token * KV_HEADS * GROUP + head)[:, None] * DIM + d[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=inside)


@kernel()
def _row_of_tile(tile: tl.tensor, query_start: tl.tensor, num_rows: tl.tensor, BLOCK_Q: tl.constexpr) -> tl.tensor:
    """The last row whose first tile is not after this one, by bisection."""
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        reached = tl.load(query_start + middle) // BLOCK_Q + middle <= tile
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low
