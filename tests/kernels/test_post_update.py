import pytest
import torch

from stepahead.kernels.post_update import (
    post_update,
    post_update_numba,
    post_update_reference,
    post_update_triton,
)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_step(seed: int, k: int, drafts: bool) -> tuple:
    generator = torch.Generator().manual_seed(seed)

    def rand(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    n = 6
    slots = torch.randperm(9, generator=generator, dtype=torch.int32)[:n]
    slots[rand(0, 4, n) == 0] = -1
    query_start = torch.cat((ints(0), rand(k, k + 5, n).cumsum(0, dtype=torch.int32)))
    num_sampled = rand(0, k + 1, n)
    return (
        slots, query_start, rand(0, 1000, n, k), num_sampled, num_sampled + rand(0, 3, n) if drafts else None,
        rand(0, 50, 9), rand(1, 34, 9), rand(0, 1000, 9, 35), rand(0, 1000, 9, 1),
    )  # fmt: skip


def expected_state(step: tuple) -> tuple[torch.Tensor, ...]:
    slots, query_start, sampled, num_sampled, num_drafts, *state = step
    num_computed, num_tokens, all_token_ids, last_sampled = (x.clone() for x in state)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        count = int(num_sampled[row])
        num_computed[slot] += query_start[row + 1] - query_start[row]
        if count and num_drafts is not None:
            num_computed[slot] -= num_drafts[row] - (count - 1)
        for token in sampled[row, :count].tolist():
            if num_tokens[slot] < all_token_ids.shape[1]:
                all_token_ids[slot, num_tokens[slot]] = token
            num_tokens[slot] += 1
            last_sampled[slot, 0] = token
    return num_computed, num_tokens, all_token_ids, last_sampled


@pytest.mark.parametrize("update", [post_update_reference, post_update_numba, post_update_triton])
@pytest.mark.parametrize(("k", "drafts"), [(1, False), (3, True), (4, True)])
@pytest.mark.parametrize("seed", range(5))
def test_state_afterwards_is_that_of_one_row_after_another(device, update, seed, k, drafts):
    step = random_step(seed, k, drafts)
    expected = expected_state(step)
    if update is post_update_numba:
        pytest.importorskip("numba")
    if update is post_update_triton:
        step = tuple(x if x is None else x.to(device) for x in step)
    update(*step)
    for state, value in zip(step[-4:], expected, strict=True):
        assert torch.equal(state.cpu(), value)


def test_a_chunk_that_does_not_finish_its_prefill_only_advances_num_computed():
    num_computed, num_tokens, ids, last = ints(4), ints(9), torch.arange(12).int()[None], ints(33)[:, None]
    post_update(ints(0), ints(0, 3), ints(77)[:, None], ints(0), None, num_computed, num_tokens, ids, last)
    assert (num_computed.item(), num_tokens.item(), last.item()) == (7, 9, 33)
    assert ids.tolist() == [list(range(12))]


def test_rejected_drafts_are_computed_again():
    """4 drafts checked, 1 accepted: the sampled token and the accepted draft count, 3 positions do not."""
    num_computed, num_tokens, ids, last = ints(9), ints(10), torch.zeros(1, 20, dtype=torch.int32), ints(5)[:, None]
    sampled = ints(7, 8, 0, 0, 0)[None]
    post_update(ints(0), ints(0, 5), sampled, ints(2), ints(4), num_computed, num_tokens, ids, last)
    assert (num_computed.item(), num_tokens.item(), last.item()) == (11, 12, 8)
    assert ids[0, 10:13].tolist() == [7, 8, 0]


def test_many_padding_rows_do_not_touch_slot_0_even_when_a_row_writes_it():
    num_computed, num_tokens, ids, last = ints(4), ints(5), torch.zeros(1, 8, dtype=torch.int32), ints(1)[:, None]
    slots, start = ints(-1, 0, -1, -1), ints(0, 1, 2, 3, 4)
    sampled, count = ints(90, 50, 91, 92)[:, None], ints(1, 1, 1, 1)
    post_update(slots, start, sampled, count, None, num_computed, num_tokens, ids, last)
    assert (num_computed.item(), num_tokens.item(), last.item()) == (5, 6, 50)
    assert ids.tolist() == [[0, 0, 0, 0, 0, 50, 0, 0]]
