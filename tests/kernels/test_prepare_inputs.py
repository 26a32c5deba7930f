import pytest
import torch

from stepahead.kernels.prepare_inputs import (
    prepare_inputs,
    prepare_inputs_numba,
    prepare_inputs_reference,
    prepare_inputs_triton,
)


def random_step(seed: int) -> tuple:
    """Arguments with padding rows, several block sizes, and queries longer than one program's share."""
    generator = torch.Generator().manual_seed(seed)

    def rand(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)

    n, block_size = 1 + seed % 5, 1 << (seed % 6)
    slots = torch.randperm(8, generator=generator, dtype=torch.int32)[:n]
    slots[rand(2, n) > 0] = -1 if seed % 3 == 0 else 2
    query_len = rand(700 if seed % 2 else 3, n) + 1
    query_start = torch.cat((torch.zeros(1, dtype=torch.int32), query_len.cumsum(0, dtype=torch.int32)))
    num_computed = rand(300, 8)
    block_table = rand(1000, 8, 1100 // block_size + 1)
    return slots, query_start, num_computed, block_table, block_size, int(query_len.sum()), int(query_len.max())


@pytest.mark.parametrize("seed", range(12))
def test_numba_equals_reference(seed):
    pytest.importorskip("numba")
    step = random_step(seed)
    for mine, reference in zip(prepare_inputs_numba(*step), prepare_inputs_reference(*step), strict=True):
        assert mine.dtype == reference.dtype
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("seed", range(12))
def test_kernel_equals_reference(device, seed):
    step = random_step(seed)
    ours = prepare_inputs_triton(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in step))
    for mine, reference in zip(ours, prepare_inputs_reference(*step), strict=True):
        assert mine.dtype == reference.dtype
        assert torch.equal(mine.cpu(), reference)


@pytest.mark.parametrize("seed", range(12))
def test_every_token_gets_its_position_and_place(seed):
    slots, query_start, num_computed, block_table, block_size, _, _ = step = random_step(seed)
    positions, seq_lens, slot_mapping = prepare_inputs(*step)
    for row, slot in enumerate(slots.tolist()):
        tokens = range(int(query_start[row]), int(query_start[row + 1]))
        assert seq_lens[row] == (0 if slot < 0 else num_computed[slot] + len(tokens))
        for i, token in enumerate(tokens):
            if slot < 0:
                assert (positions[token], slot_mapping[token]) == (0, -1)
            else:
                position = int(num_computed[slot]) + i
                block = int(block_table[slot, position // block_size])
                assert positions[token] == position
                assert slot_mapping[token] == block * block_size + position % block_size
