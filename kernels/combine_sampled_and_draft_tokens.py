"""A step's input ids, read where they already are: on the device."""

from __future__ import annotations

import torch


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
    return combine_sampled_and_draft_tokens_reference(
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
