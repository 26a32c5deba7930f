"""A step's input ids, read where they already are: on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._numba import NumbaKernel, keeps_state_in_numba
from ._triton import ceil_div, kernel

if TYPE_CHECKING:
    import triton.language as tl

    from . import _numba_language as nl


def combine_sampled_and_draft_tokens(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_len: torch.Tensor,
    num_tokens: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    max_query_len: int,
) -> torch.Tensor:
    """Position p of a request reads its known tokens while p < prefill_len, then the token sampled
    last when p = num_tokens - 1, then draft p - num_tokens.

    slots: int32 [n], -1 for a padding row (its ids are 0). query_start: int32 [n + 1].
    positions: int64 [t]. Per slot: all_token_ids int32 [num_slots, max_len], prefill_len and
    num_tokens int32 [num_slots], last_sampled int32 [num_slots, 1], draft_tokens int32 [num_slots, k], k >= 0.
    max_query_len: host-side upper bound over the rows. Returns input_ids int32 [t].
    """
    if slots.is_cuda:
        function = combine_sampled_and_draft_tokens_triton
    elif keeps_state_in_numba(slots):
        function = combine_sampled_and_draft_tokens_numba
    else:
        function = combine_sampled_and_draft_tokens_reference
    return function(
        slots, query_start, positions, all_token_ids, prefill_len, num_tokens, last_sampled, draft_tokens, max_query_len
    )


def combine_sampled_and_draft_tokens_reference(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_len: torch.Tensor,
    num_tokens: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    max_query_len: int,
) -> torch.Tensor:
    slot_of_token = torch.repeat_interleave(slots, query_start.diff(), output_size=positions.shape[0]).long()
    rows = slot_of_token.clamp(min=0)
    input_ids = last_sampled[rows, 0]
    num_drafts = draft_tokens.shape[1]
    if num_drafts:
        draft = positions - num_tokens[rows]
        input_ids = torch.where(draft >= 0, draft_tokens[rows, draft.clamp(0, num_drafts - 1)], input_ids)
    known = all_token_ids[rows, positions]
    input_ids = torch.where(positions < prefill_len[rows], known, input_ids)
    return torch.where(slot_of_token >= 0, input_ids, 0)


def combine_sampled_and_draft_tokens_triton(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_len: torch.Tensor,
    num_tokens: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    max_query_len: int,
) -> torch.Tensor:
    input_ids = torch.empty(positions.shape[0], dtype=torch.int32, device=slots.device)
    if slots.shape[0]:
        block = 256
        _combine_kernel[(slots.shape[0], ceil_div(max_query_len, block))](
            slots, query_start, positions, all_token_ids, prefill_len, num_tokens, last_sampled, draft_tokens,
            input_ids, all_token_ids.stride(0), last_sampled.stride(0),
            NUM_DRAFTS=draft_tokens.shape[1], BLOCK=block, num_warps=2,
        )  # fmt: skip
    return input_ids


@kernel(do_not_specialize=("slots", "query_start", "positions"))
def _combine_kernel(
    slots: tl.tensor,
    query_start: tl.tensor,
    positions: tl.tensor,
    all_token_ids: tl.tensor,
    prefill_len: tl.tensor,
    num_tokens: tl.tensor,
    last_sampled: tl.tensor,
    draft_tokens: tl.tensor,
    input_ids: tl.tensor,
    ids_stride: tl.tensor,
    last_stride: tl.tensor,
    NUM_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    begin = tl.load(query_start + row)
    end = tl.load(query_start + row + 1)
    slot = tl.load(slots + row).to(tl.int64)
    real = slot >= 0
    token = begin + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < end
    position = tl.load(positions + token, mask=inside, other=0)
    has_slot = token < tl.where(real, end, begin)
    known = has_slot & (position < tl.load(prefill_len + slot, mask=real, other=0))
    draft = position - tl.load(num_tokens + slot, mask=real, other=0)
    last = tl.load(last_sampled + slot * last_stride, mask=real, other=0)
    drafted = has_slot & (draft >= 0) & (draft < NUM_DRAFTS)
    other = tl.load(draft_tokens + slot * NUM_DRAFTS + draft, mask=drafted, other=last)
    ids = tl.load(all_token_ids + slot * ids_stride + position, mask=known, other=other)
    tl.store(input_ids + token, ids, mask=inside)


def combine_sampled_and_draft_tokens_numba(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_len: torch.Tensor,
    num_tokens: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    max_query_len: int,
) -> torch.Tensor:
    input_ids = torch.empty(positions.shape[0], dtype=torch.int32)
    words = (
        slots.data_ptr(), query_start.data_ptr(), positions.data_ptr(), all_token_ids.data_ptr(),
        prefill_len.data_ptr(), num_tokens.data_ptr(), last_sampled.data_ptr(), draft_tokens.data_ptr(),
        input_ids.data_ptr(), all_token_ids.stride(0), last_sampled.stride(0), draft_tokens.shape[1],
    )  # fmt: skip
    _combine_loop.launch_integers(words, slots.shape[0], positions.shape[0])
    return input_ids


@NumbaKernel
def _combine_loop(args: nl.Args) -> None:
    slots, query_start, positions = nl.int32s(args, 0), nl.int32s(args, 1), nl.int64s(args, 2)
    all_token_ids, prefill_len, num_tokens = nl.int32s(args, 3), nl.int32s(args, 4), nl.int32s(args, 5)
    last_sampled, draft_tokens, input_ids = nl.int32s(args, 6), nl.int32s(args, 7), nl.int32s(args, 8)
    ids_stride, last_stride, num_drafts = nl.integer(args, 9), nl.integer(args, 10), nl.integer(args, 11)
    row = nl.next_task(args)
    while row >= 0:
        slot = slots[row]
        for token in range(query_start[row], query_start[row + 1]):
            if slot < 0:
                input_ids[token] = 0
            elif positions[token] < prefill_len[slot]:
                input_ids[token] = all_token_ids[slot * ids_stride + positions[token]]
            else:
                draft = positions[token] - num_tokens[slot]
                if 0 <= draft < num_drafts:
                    input_ids[token] = draft_tokens[slot * num_drafts + draft]
                else:
                    input_ids[token] = last_sampled[slot * last_stride]
        row = nl.next_task(args)
