"""Where a step's tokens stand: positions, context lengths, and places in the KV cache."""

from __future__ import annotations

import torch


def prepare_inputs(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_tokens_in_step: int,
    max_query_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row i computes tokens num_computed[slots[i]] onwards of its request.

    slots: int32 [n], -1 for a padding row. query_start: int32 [n + 1], query_start[n] = t.
    num_computed: int32 [num_slots]. block_table: int32 [num_slots, max_blocks].
    num_tokens_in_step: t. max_query_len: host-side upper bound over the rows.
    Returns (positions int64 [t], seq_lens int32 [n], slot_mapping int64 [t]); a padding row has
    seq_len 0, and its tokens position 0 and slot mapping -1.
    """
    return prepare_inputs_reference(
        slots, query_start, num_computed, block_table, block_size, num_tokens_in_step, max_query_len
    )


def prepare_inputs_reference(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_tokens_in_step: int,
    max_query_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    real = slots >= 0
    rows = slots.clamp(min=0).long()
    computed = num_computed[rows]
    query_len = query_start.diff()
    seq_lens = torch.where(real, computed + query_len, 0)
    row_of_token = torch.repeat_interleave(query_len, output_size=num_tokens_in_step)
    offset = torch.arange(num_tokens_in_step, device=slots.device) - query_start[row_of_token]
    real_token = real[row_of_token]
    positions = torch.where(real_token, computed[row_of_token] + offset, 0)
    block = block_table[rows[row_of_token], positions // block_size].long()
    slot_mapping = torch.where(real_token, block * block_size + positions % block_size, -1)
    return positions, seq_lens, slot_mapping
