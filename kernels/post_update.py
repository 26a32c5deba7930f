"""Writes a step's sampled tokens into the persistent batch, so that the next step can read them there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._numba import NumbaKernel, keeps_state_in_numba
from ._triton import kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl

    from . import _numba_language as nl


def post_update(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_drafts: torch.Tensor | None,
    num_computed: torch.Tensor,
    num_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
    last_sampled: torch.Tensor,
) -> None:
    """In place: num_computed grows by the query length less rejected drafts; sampled tokens join
    all_token_ids at num_tokens, which grows by num_sampled; last_sampled becomes the last of them.

    slots: int32 [n], -1 for a padding row. query_start: int32 [n + 1]. sampled: int32 [n, k].
    num_sampled: int32 [n]; 0 only advances num_computed. num_drafts: int32 [n], how many drafts were
    checked (num_sampled - 1 of them were accepted), or None. Per slot: num_computed, num_tokens int32
    [num_slots], all_token_ids int32 [num_slots, max_len], last_sampled int32 [num_slots, 1].
    """
    if slots.is_cuda:
        function = post_update_triton
    else:
        function = post_update_numba if keeps_state_in_numba(slots) else post_update_reference
    function(
        slots, query_start, sampled, num_sampled, num_drafts, num_computed, num_tokens, all_token_ids, last_sampled
    )


def post_update_reference(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_drafts: torch.Tensor | None,
    num_computed: torch.Tensor,
    num_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
    last_sampled: torch.Tensor,
) -> None:
    """Adds differences, because adding 0 for what must not change is harmless however rows repeat."""
    real = slots >= 0
    rows = slots.clamp(min=0).long()
    count = torch.where(real, num_sampled, 0)
    advance = query_start.diff()
    if num_drafts is not None:
        advance = advance - torch.where(count > 0, num_drafts - (count - 1), 0)

    first = num_tokens[rows]
    j = torch.arange(sampled.shape[1], device=slots.device, dtype=torch.int32)
    column = first.unsqueeze(1) + j
    appended = (j < count.unsqueeze(1)) & (column < all_token_ids.shape[1])
    cell = rows.unsqueeze(1) * all_token_ids.shape[1] + column.clamp(max=all_token_ids.shape[1] - 1)
    flat = all_token_ids.view(-1)
    flat.index_add_(0, cell.view(-1), torch.where(appended, sampled - flat[cell], 0).view(-1))

    last = sampled.gather(1, (count - 1).clamp(min=0).long().unsqueeze(1)).squeeze(1)
    last_column = last_sampled[:, 0]
    last_column.index_add_(0, rows, torch.where(count > 0, last - last_column[rows], 0))
    num_computed.index_add_(0, rows, torch.where(real, advance, 0))
    num_tokens.index_add_(0, rows, count)


def post_update_triton(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_drafts: torch.Tensor | None,
    num_computed: torch.Tensor,
    num_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
    last_sampled: torch.Tensor,
) -> None:
    if slots.shape[0]:
        _post_update_kernel[(slots.shape[0],)](
            slots, query_start, sampled, num_sampled, num_sampled if num_drafts is None else num_drafts,
            num_computed, num_tokens, all_token_ids, last_sampled,
            sampled.stride(0), all_token_ids.stride(0), last_sampled.stride(0), all_token_ids.shape[1],
            HAS_DRAFTS=num_drafts is not None, BLOCK=next_power_of_2(sampled.shape[1]), num_warps=1,
        )  # fmt: skip


@kernel(do_not_specialize=("slots", "query_start", "sampled", "num_sampled", "num_drafts"))
def _post_update_kernel(
    slots: tl.tensor,
    query_start: tl.tensor,
    sampled: tl.tensor,
    num_sampled: tl.tensor,
    num_drafts: tl.tensor,
    num_computed: tl.tensor,
    num_tokens: tl.tensor,
    all_token_ids: tl.tensor,
    last_sampled: tl.tensor,
    sampled_stride: tl.tensor,
    ids_stride: tl.tensor,
    last_stride: tl.tensor,
    max_len: tl.tensor,
    HAS_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        count = tl.load(num_sampled + row)
        advance = tl.load(query_start + row + 1) - tl.load(query_start + row)
        if HAS_DRAFTS:
            advance -= tl.where(count > 0, tl.load(num_drafts + row) - (count - 1), 0)
        tl.store(num_computed + slot, tl.load(num_computed + slot) + advance)
        if count > 0:
            first = tl.load(num_tokens + slot)
            j = tl.arange(0, BLOCK)
            tokens = tl.load(sampled + row * sampled_stride + j, mask=j < count, other=0)
            appended = (j < count) & (first + j < max_len)
            tl.store(all_token_ids + slot * ids_stride + first + j, tokens, mask=appended)
            tl.store(last_sampled + slot * last_stride, tl.load(sampled + row * sampled_stride + count - 1))
            tl.store(num_tokens + slot, first + count)


def post_update_numba(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_drafts: torch.Tensor | None,
    num_computed: torch.Tensor,
    num_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
    last_sampled: torch.Tensor,
) -> None:
    words = (
        slots.data_ptr(), query_start.data_ptr(), sampled.data_ptr(), num_sampled.data_ptr(),
        0 if num_drafts is None else num_drafts.data_ptr(), num_computed.data_ptr(), num_tokens.data_ptr(),
        all_token_ids.data_ptr(), last_sampled.data_ptr(), sampled.stride(0), all_token_ids.stride(0),
        last_sampled.stride(0), all_token_ids.shape[1], num_drafts is not None,
    )  # fmt: skip
    _post_update_loop.launch_integers(words, slots.shape[0], sampled.numel())


@NumbaKernel
def _post_update_loop(args: nl.Args) -> None:
    slots, query_start, sampled = nl.int32s(args, 0), nl.int32s(args, 1), nl.int32s(args, 2)
    num_sampled, num_drafts, num_computed = nl.int32s(args, 3), nl.int32s(args, 4), nl.int32s(args, 5)
    num_tokens, all_token_ids, last_sampled = nl.int32s(args, 6), nl.int32s(args, 7), nl.int32s(args, 8)
    sampled_stride, ids_stride = nl.integer(args, 9), nl.integer(args, 10)
    last_stride, max_len, has_drafts = nl.integer(args, 11), nl.integer(args, 12), nl.integer(args, 13)
    row = nl.next_task(args)
    while row >= 0:
        slot, count = slots[row], num_sampled[row]
        if slot >= 0:
            advance = query_start[row + 1] - query_start[row]
            if has_drafts and count > 0:
                advance -= num_drafts[row] - (count - 1)
            num_computed[slot] += advance
            first = num_tokens[slot]
            for j in range(count):
                token = sampled[row * sampled_stride + j]
                last_sampled[slot * last_stride] = token
                if first + j < max_len:
                    all_token_ids[slot * ids_stride + first + j] = token
            num_tokens[slot] = first + count
        row = nl.next_task(args)
