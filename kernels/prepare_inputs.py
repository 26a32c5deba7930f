"""Where a step's tokens stand: positions, context lengths, and places in the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._numba import NumbaKernel, keeps_state_in_numba
from ._triton import ceil_div, kernel

if TYPE_CHECKING:
    import triton.language as tl

    from . import _numba_language as nl


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
    if slots.is_cuda:
        function = prepare_inputs_triton
    else:
        function = prepare_inputs_numba if keeps_state_in_numba(slots) else prepare_inputs_reference
    return function(slots, query_start, num_computed, block_table, block_size, num_tokens_in_step, max_query_len)


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


def prepare_inputs_triton(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_tokens_in_step: int,
    max_query_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, device = slots.shape[0], slots.device
    positions = torch.empty(num_tokens_in_step, dtype=torch.int64, device=device)
    slot_mapping = torch.empty_like(positions)
    seq_lens = torch.empty(n, dtype=torch.int32, device=device)
    if n:
        block = 256
        _prepare_inputs_kernel[(n, ceil_div(max_query_len, block))](
            slots, query_start, num_computed, block_table, positions, seq_lens, slot_mapping, block_table.stride(0),
            BLOCK_SIZE=block_size, BLOCK=block, num_warps=2,
        )  # fmt: skip
    return positions, seq_lens, slot_mapping


@kernel(do_not_specialize=("slots", "query_start"))
def _prepare_inputs_kernel(
    slots: tl.tensor,
    query_start: tl.tensor,
    num_computed: tl.tensor,
    block_table: tl.tensor,
    positions: tl.tensor,
    seq_lens: tl.tensor,
    slot_mapping: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    begin = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - begin
    slot = tl.load(slots + row).to(tl.int64)
    real = slot >= 0
    computed = tl.load(num_computed + slot, mask=real, other=0)
    if tl.program_id(1) == 0:
        tl.store(seq_lens + row, tl.where(real, computed + query_len, 0))
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < query_len
    position = tl.where(real, computed + offset, 0)
    table = block_table + slot * table_stride
    has_block = offset < tl.where(real, query_len, 0)
    block = tl.load(table + position // BLOCK_SIZE, mask=has_block, other=0).to(tl.int64)
    place = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(positions + begin + offset, position.to(tl.int64), mask=inside)
    tl.store(slot_mapping + begin + offset, place, mask=inside)


def prepare_inputs_numba(
    slots: torch.Tensor,
    query_start: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_tokens_in_step: int,
    max_query_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    positions = torch.empty(num_tokens_in_step, dtype=torch.int64)
    slot_mapping = torch.empty_like(positions)
    seq_lens = torch.empty(slots.shape[0], dtype=torch.int32)
    words = (
        slots.data_ptr(), query_start.data_ptr(), num_computed.data_ptr(), block_table.data_ptr(),
        positions.data_ptr(), seq_lens.data_ptr(), slot_mapping.data_ptr(), block_table.stride(0), block_size,
    )  # fmt: skip
    _prepare_inputs_loop.launch_integers(words, slots.shape[0], num_tokens_in_step)
    return positions, seq_lens, slot_mapping


@NumbaKernel
def _prepare_inputs_loop(args: nl.Args) -> None:
    slots, query_start, num_computed = nl.int32s(args, 0), nl.int32s(args, 1), nl.int32s(args, 2)
    block_table, positions, seq_lens = nl.int32s(args, 3), nl.int64s(args, 4), nl.int32s(args, 5)
    slot_mapping, table_stride, block_size = nl.int64s(args, 6), nl.integer(args, 7), nl.integer(args, 8)
    row = nl.next_task(args)
    while row >= 0:
        slot, begin, end = slots[row], query_start[row], query_start[row + 1]
        if slot < 0:
            seq_lens[row] = 0
            for token in range(begin, end):
                positions[token], slot_mapping[token] = 0, -1
        else:
            computed = num_computed[slot]
            seq_lens[row] = computed + end - begin
            for token in range(begin, end):
                position = computed + token - begin
                block = block_table[slot * table_stride + position // block_size]
                positions[token] = position
                slot_mapping[token] = block * block_size + position % block_size
        row = nl.next_task(args)
