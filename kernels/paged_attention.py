"""Causal attention over a paged KV cache, for decode rows and prefill chunks in one batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from ._numba import runs_in_numba
from .paged_attention_decode import paged_attention_decode_triton
from .paged_attention_decode_numba import paged_attention_decode_numba
from .paged_attention_prefill import paged_attention_prefill_triton

_GROUP_ELEMENTS = 1 << 19
_QUERY_TILE = 128


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int = 0,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of each token over the tokens of its row up to itself.

    q: [t, heads, d] (d contiguous); heads is a multiple of kv_heads, and query heads that share a KV head are
    neighbours.
    k_cache, v_cache: [blocks, block_size, kv_heads, d]; the step's own keys and values are already there.
    block_tables: int32 [n, max_blocks]. query_start: int32 [n + 1]. seq_lens: int32 [n], the context
    length with the step's tokens; 0 for a padding row, which comes back as zeros. What the cache holds past
    a row's length, or before its window, is never used, be it NaN. max_query_len, max_seq_len: host-side
    upper bounds. sliding_window: how many tokens a query sees, itself included; 0 for all.
    Returns [t, heads, d].
    """
    if q.is_cuda:
        function = paged_attention_triton
    else:
        function = paged_attention_numba if runs_in_numba(q, q.shape[2]) else paged_attention_reference
    return function(
        q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, max_query_len, max_seq_len, sliding_window
    )


def paged_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int = 0,
) -> torch.Tensor:
    """Decode rows of a mixed batch keep the decode kernel: a long context would hold up the others."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0] == 0:
        return out
    paged_attention_decode_triton(
        q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, max_seq_len, sliding_window, out
    )
    if max_query_len > 1:
        paged_attention_prefill_triton(
            q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, sliding_window, out
        )
    return out


def paged_attention_numba(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int = 0,
) -> torch.Tensor:
    """Rows of one token by a kernel; chunks by torch, as in the reference."""
    out = torch.empty(q.shape, dtype=q.dtype)
    paged_attention_decode_numba(
        q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, max_seq_len, sliding_window, out
    )
    if max_query_len > 1:
        window = sliding_window or max_seq_len
        _attend_chunks(q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, window, out)
    return out


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int = 0,
) -> torch.Tensor:
    """For CPU tensors: it reads row lengths and block tables on the host.

    Rows of one token run together with rows of similar length, few enough for the CPU's cache to hold their
    keys; a longer row runs alone.
    """
    starts, lens, tables = query_start.numpy(), seq_lens.numpy(), block_tables.numpy()
    query_lens = np.diff(starts)
    out = torch.zeros_like(q)
    window = sliding_window or max_seq_len
    keys_per_group = _GROUP_ELEMENTS // (k_cache.shape[2] * k_cache.shape[3])
    singles = np.flatnonzero((query_lens == 1) & (lens > 0))
    for rows in _similar_lengths(singles, np.minimum(lens, window), keys_per_group):
        tokens = torch.from_numpy(starts[rows])
        _attend_singles(q, k_cache, v_cache, tables[rows], tokens, lens[rows], scale, window, out)
    _attend_chunks(q, k_cache, v_cache, block_tables, query_start, seq_lens, scale, window, out)
    return out


def _similar_lengths(rows: np.ndarray, lens: np.ndarray, keys_per_group: int) -> Iterator[np.ndarray]:
    """Cuts rows, longest first, into groups of about keys_per_group keys, padding included."""
    rows = rows[np.argsort(-lens[rows], kind="stable")]
    while len(rows):
        count = max(1, keys_per_group // int(lens[rows[0]]))
        yield rows[:count]
        rows = rows[count:]


def _attend_singles(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: np.ndarray,
    tokens: torch.Tensor,
    lens: np.ndarray,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """m rows of one query token each. tables: [m, max_blocks]. tokens: int32 [m], where they are in q and out."""
    _, block_size, kv_heads, dim = k_cache.shape
    first = np.maximum(lens - window, 0) // block_size
    columns = first[:, None] + np.arange(((lens - 1) // block_size - first).max() + 1)
    columns = np.minimum(columns, (lens[:, None] - 1) // block_size)
    blocks = torch.from_numpy(np.take_along_axis(tables, columns, axis=1).ravel())
    ends = lens - first * block_size
    begins = np.maximum(ends - window, 0)
    column = np.arange(ends.max())
    seen = torch.from_numpy((column >= begins[:, None]) & (column < ends[:, None]))

    shape = len(lens), -1, kv_heads, dim
    k = k_cache.index_select(0, blocks).view(shape)[:, : len(column)]
    v = v_cache.index_select(0, blocks).view(shape)[:, : len(column)]
    for edge in (slice(0, begins.max()), slice(ends.min(), len(column))):
        if edge.start < edge.stop:
            unseen = ~seen[:, edge, None, None]
            k[:, edge].masked_fill_(unseen, 0.0)
            v[:, edge].masked_fill_(unseen, 0.0)
    mask = None if seen.numpy().all() else seen[:, None, None, :]
    queries = q.index_select(0, tokens).unflatten(1, (kv_heads, -1))
    result = F.scaled_dot_product_attention(queries, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    out.index_copy_(0, tokens.long(), result.flatten(1, 2))


def _attend_chunks(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """The rows of several tokens, one after the other."""
    starts, lens, tables = query_start.numpy(), seq_lens.numpy(), block_tables.numpy()
    for row in np.flatnonzero(np.diff(starts) > 1):
        begin, end = int(starts[row]), int(starts[row + 1])
        if lens[row]:
            _attend_chunk(q[begin:end], k_cache, v_cache, tables[row], int(lens[row]), scale, window, out[begin:end])
        else:
            out[begin:end] = 0.0


def _attend_chunk(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: np.ndarray,
    length: int,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """One row. q, out: [query_len, heads, d]. table: [max_blocks]."""
    _, block_size, kv_heads, dim = k_cache.shape
    computed = length - q.shape[0]
    first = max(computed + 1 - window, 0) // block_size
    blocks = torch.from_numpy(table[first : (length - 1) // block_size + 1])
    shape = -1, kv_heads, 1, dim
    queries = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    heads = -1, queries.shape[1], -1, -1
    k, v = (
        cache.index_select(0, blocks).view(shape)[: length - first * block_size].permute(1, 2, 0, 3).expand(heads)
        for cache in (k_cache, v_cache)
    )
    if window >= length:
        target = out.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        target.copy_(_attend_past_and_own(queries, k, v, computed, scale))
    else:
        _attend_window(queries, k, v, computed, computed - first * block_size, scale, window, out)


def _attend_past_and_own(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, computed: int, scale: float
) -> torch.Tensor:
    """q: [kv_heads, group, query_len, d]. k, v: [kv_heads, group, computed + query_len, d].

    Without a mask, which costs more than the products: all of the past, and, causally, the row's own tokens. The two
    are weighed by the sums of their softmaxes.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own, own_weight = attend(q, k[:, :, computed:], v[:, :, computed:], 0.0, True, scale=scale)
    if not computed:
        return own
    past, past_weight = attend(q, k[:, :, :computed], v[:, :, :computed], 0.0, False, scale=scale)
    share = torch.sigmoid(past_weight - own_weight).unsqueeze(-1)
    return torch.lerp(own.float(), past.float(), share).to(q.dtype)


def _attend_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    computed: int,
    before: int,
    scale: float,
    window: int,
    out: torch.Tensor,
) -> None:
    """Tiles of queries see only keys they need. before: how many of the keys belong to computed tokens."""
    query_len = q.shape[2]
    skipped = computed - before
    for begin in range(0, query_len, _QUERY_TILE):
        end = min(begin + _QUERY_TILE, query_len)
        low, high = max(computed + begin + 1 - window, 0), computed + end
        keys = slice(low - skipped, high - skipped)
        behind = np.arange(computed + begin, high)[:, None] - np.arange(low, high)
        result = F.scaled_dot_product_attention(
            q[:, :, begin:end],
            k[:, :, keys],
            v[:, :, keys],
            attn_mask=torch.from_numpy((behind >= 0) & (behind < window)),
            scale=scale,
        )
        out[begin:end] = result.permute(2, 0, 1, 3).flatten(1, 2)
