import itertools

import pytest
import torch

from stepahead.kernels.combine_sampled_and_draft_tokens import (
    combine_sampled_and_draft_tokens,
    combine_sampled_and_draft_tokens_numba,
    combine_sampled_and_draft_tokens_reference,
    combine_sampled_and_draft_tokens_triton,
)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_step(seed: int, num_drafts: int) -> tuple:
    """Rows in prefill, rows at their last sampled token with drafts behind it, and padding rows."""
    generator = torch.Generator().manual_seed(seed)

    def rand(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    slots = torch.randperm(8, generator=generator, dtype=torch.int32)[:6]
    prefill_len = rand(300, 600, 8)
    num_tokens = prefill_len.clone()
    starts, positions = [0], []
    for row, slot in enumerate(slots.tolist()):
        if row % 2:
            first = int(rand(0, 300, 1))
            span = range(first, int(rand(first + 1, int(prefill_len[slot]) + 1, 1)))
        else:
            num_tokens[slot] += int(rand(1, 50, 1))
            span = range(int(num_tokens[slot]) - 1, int(num_tokens[slot]) + num_drafts)
        positions.extend(span)
        starts.append(len(positions))
    slots[rand(0, 6, 1)] = -1
    return (
        slots, ints(*starts), torch.tensor(positions), rand(0, 999, 8, 700), prefill_len, num_tokens,
        rand(1000, 1999, 8, 1), rand(2000, 2999, 8, num_drafts),
        max(b - a for a, b in itertools.pairwise(starts)),
    )  # fmt: skip


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_numba_equals_reference(seed, num_drafts):
    pytest.importorskip("numba")
    step = random_step(seed, num_drafts)
    ours = combine_sampled_and_draft_tokens_numba(*step)
    assert torch.equal(ours, combine_sampled_and_draft_tokens_reference(*step))


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_kernel_equals_reference(device, seed, num_drafts):
    step = random_step(seed, num_drafts)
    ours = combine_sampled_and_draft_tokens_triton(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in step))
    assert torch.equal(ours.cpu(), combine_sampled_and_draft_tokens_reference(*step))


def test_each_position_reads_prefill_then_last_sampled_then_drafts():
    all_token_ids = torch.arange(100, 120, dtype=torch.int32).repeat(3, 1)
    input_ids = combine_sampled_and_draft_tokens(
        slots=ints(2, -1, 0, 1),
        query_start=ints(0, 3, 4, 7, 9),
        positions=torch.tensor([4, 5, 6, 0, 7, 8, 9, 2, 3]),
        all_token_ids=all_token_ids,
        prefill_len=ints(5, 9, 5),
        num_tokens=ints(8, 9, 6),
        last_sampled=ints(70, 71, 72)[:, None],
        draft_tokens=ints(10, 11, 12, 13, 14, 15).view(3, 2),
        max_query_len=3,
    )
    assert input_ids.tolist() == [104, 72, 14, 0, 70, 10, 11, 102, 103]
    assert input_ids.dtype == torch.int32


def test_a_resumed_request_reads_its_old_samples_from_its_prefill():
    """After a preemption the tokens sampled before it are prefill; last_sampled still holds a stranger's."""
    input_ids = combine_sampled_and_draft_tokens(
        ints(0), ints(0, 4), torch.arange(4), ints(7, 8, 9, 5)[None], ints(4), ints(4), ints(99)[:, None],
        torch.empty(1, 0, dtype=torch.int32), 4,
    )  # fmt: skip
    assert input_ids.tolist() == [7, 8, 9, 5]
