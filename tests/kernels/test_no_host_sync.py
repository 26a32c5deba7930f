"""On a CPU nobody notices a host synchronisation, so the operations are watched while they run."""

import pytest
import torch

from stepahead.kernels.combine_sampled_and_draft_tokens import combine_sampled_and_draft_tokens
from stepahead.kernels.gumbel_sample import gumbel_sample
from stepahead.kernels.kv_write import kv_write
from stepahead.kernels.paged_attention import paged_attention
from stepahead.kernels.post_update import post_update
from stepahead.kernels.prepare_inputs import prepare_inputs
from stepahead.kernels.staged_write import staged_write
from stepahead.kernels.top_k_top_p import mask_top_k_top_p_min_p
from stepahead.worker.sync_check import sync_check


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step() -> None:
    """A chunk of 3, a decode row, a padding row; staged writes before, sampling after."""
    slots, query_start = ints(2, 0, -1), ints(0, 3, 4, 5)
    num_computed, num_tokens, prefill_len = ints(7, 0, 16), ints(8, 0, 19), ints(5, 0, 19)
    block_table, all_token_ids = torch.arange(12).int().view(3, 4), torch.zeros(3, 64, dtype=torch.int32)
    last_sampled, draft_tokens = torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
    staged_write(all_token_ids, ints(2, 0), ints(0, 5), ints(0, 2, 3), ints(4, 5, 6, 0), 2)
    positions, seq_lens, slot_mapping = prepare_inputs(slots, query_start, num_computed, block_table, 16, 5, 3)
    combine_sampled_and_draft_tokens(
        slots, query_start, positions, all_token_ids, prefill_len, num_tokens, last_sampled, draft_tokens, 3
    )
    q, k, cache = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(12, 16, 2, 16)
    kv_write(k, k, cache, cache.clone(), slot_mapping)
    paged_attention(q, cache, cache, block_table, query_start, seq_lens, 0.25, 3, 19)
    logits, ones = torch.randn(3, 50), torch.ones(3)
    masked = mask_top_k_top_p_min_p(logits, ints(5, 0, 0), ones * 0.9, ones * 0.1)
    sampled = gumbel_sample(masked, torch.tensor([1.0, 0.0, 0.0]), ones.long(), ones.long())
    post_update(
        slots, query_start, sampled[:, None], ints(0, 1, 0), None, num_computed, num_tokens, all_token_ids, last_sampled
    )


@pytest.mark.parametrize("inference", [False, True])
def test_no_operation_of_a_step_waits_for_the_device(inference: bool) -> None:
    with torch.inference_mode(inference), sync_check("error", torch.device("cpu")).watching():
        step()
