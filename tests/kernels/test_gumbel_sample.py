import math

import pytest
import torch

from stepahead.kernels import gumbel_sample as module
from stepahead.kernels.gumbel_sample import (
    gumbel_noise,
    gumbel_sample,
    gumbel_sample_reference,
    gumbel_sample_triton,
    row_keys,
)

LARGE = 2**63 - 1
BATCHES = {
    "greedy": [(0.0, 1, 1), (0.0, 2, 2)],
    "random": [(1.0, 1, 1), (0.7, -5, 99), (3.0, LARGE, 1 << 40), (1e-4, -LARGE, 0)],
    "mixed": [(0.0, 1, 1), (1.0, 1, 1), (0.0, 7, 3), (0.5, 7, 3)],
}


def rows(batch: list[tuple[float, int, int]]) -> tuple[torch.Tensor, ...]:
    temperature, seeds, positions = zip(*batch, strict=True)
    return torch.tensor(temperature), torch.tensor(seeds), torch.tensor(positions)


def draw(probabilities: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    logits = probabilities.log().expand(len(seeds), -1)
    return gumbel_sample(logits, torch.ones(len(seeds)), seeds, positions)


def noise(seed: int, position: int, vocab: int = 4096) -> torch.Tensor:
    tokens = torch.arange(vocab, dtype=torch.int32) * module._TOKEN_STEP
    return gumbel_noise(row_keys(torch.tensor([seed]), torch.tensor([position])), tokens)[0]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("vocab", [1, 50, 2048, 5000])
def test_kernel_draws_the_tokens_of_the_reference(device, batch, vocab):
    temperature, seeds, positions = rows(BATCHES[batch])
    logits = torch.randn(len(seeds), vocab)
    ours = gumbel_sample_triton(*(x.to(device) for x in (logits, temperature, seeds, positions)))
    assert ours.dtype == torch.int32
    assert torch.equal(ours.cpu(), gumbel_sample_reference(logits, temperature, seeds, positions))


@pytest.mark.parametrize("sample", [gumbel_sample_reference, gumbel_sample_triton])
def test_no_rows_give_no_tokens(device, sample):
    empty = torch.empty(0), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    assert sample(torch.empty(0, 100), *empty).shape == (0,)


@pytest.mark.parametrize("sample", [gumbel_sample_reference, gumbel_sample_triton])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_never_drawn_and_a_row_of_them_gives_a_valid_one(device, sample, temperature):
    if sample is gumbel_sample_reference:
        device = "cpu"
    logits = torch.full((100, 40), -torch.inf, device=device)
    logits[1:, 7] = -1e30
    logits[1:, 39] = -1e30
    index = torch.arange(100, device=device)
    tokens = sample(logits, torch.full((100,), temperature, device=device), index, index)
    assert tokens[0] == 0
    assert set(tokens[1:].tolist()) <= {7, 39}


@pytest.mark.parametrize("sample", [gumbel_sample_reference, gumbel_sample_triton])
def test_a_row_of_nan_gives_a_valid_token(device, sample):
    arguments = torch.full((1, 100), torch.nan), torch.ones(1), torch.zeros(1).long(), torch.zeros(1).long()
    if sample is gumbel_sample_triton:
        arguments = tuple(x.to(device) for x in arguments)
    assert 0 <= sample(*arguments).item() < 100


@pytest.mark.parametrize("sample", [gumbel_sample_reference, gumbel_sample_triton])
def test_greedy_rows_take_the_first_maximum(device, sample):
    if sample is gumbel_sample_reference:
        device = "cpu"
    logits = torch.zeros(2, 5000, device=device)
    logits[0, [4999, 2100, 2050]] = 3.0
    tokens = sample(logits, torch.tensor([0.0, 0.0], device=device), *torch.ones(2, 2, device=device).long())
    assert tokens.tolist() == [2050, 0]


def test_a_row_is_drawn_alike_alone_and_in_any_batch(monkeypatch):
    n, vocab = 40, 300
    logits, temperature = torch.randn(n, vocab), torch.rand(n) * (torch.arange(n) % 3 > 0)
    seeds, positions = torch.randint(-LARGE, LARGE, (n,)), torch.randint(0, 5000, (n,))
    together = gumbel_sample(logits, temperature, seeds, positions)
    shuffled = torch.randperm(n)
    again = gumbel_sample(logits[shuffled], temperature[shuffled], seeds[shuffled], positions[shuffled])
    assert torch.equal(again, together[shuffled])
    monkeypatch.setattr(module, "_CACHED_ELEMENTS", 1)
    assert torch.equal(gumbel_sample(logits, temperature, seeds, positions), together)


@pytest.mark.parametrize("vary", ["positions", "seeds", "high words"])
def test_frequencies_are_the_probabilities(vary):
    """Chi-square over consecutive counters, which a weak hash would correlate."""
    n = 20000
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.02])
    counter, fixed = torch.arange(n), torch.full((n,), 12345)
    if vary == "high words":
        tokens = draw(probabilities, (counter % 141) << 32, (counter // 141) << 32)
    else:
        tokens = draw(probabilities, *((fixed, counter) if vary == "positions" else (counter, fixed)))
    expected = probabilities * n
    chi_square = ((tokens.bincount(minlength=7) - expected) ** 2 / expected).sum()
    assert chi_square < 22.5  # the 0.999 quantile for 6 degrees of freedom


@pytest.mark.parametrize("vary", ["position", "seed"])
def test_neighbouring_draws_are_independent(vary):
    """The pairs (draw i, draw i + 1) are spread evenly over all 25 combinations."""
    n = 20000
    counter, fixed = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    tokens = draw(torch.ones(5) / 5, *((fixed, counter) if vary == "position" else (counter, fixed)))
    pairs = (tokens[:-1] * 5 + tokens[1:]).bincount(minlength=25)
    chi_square = ((pairs - n / 25) ** 2 / (n / 25)).sum()
    assert chi_square < 51.2  # the 0.999 quantile for 24 degrees of freedom


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0, 0), (1, 0)), ((0, 0), (0, 1)), ((1, 0), (0, 1)), ((5, 7), (7, 5)), ((0, 0), (1 << 32, 0)),
        ((0, 0), (0, 1 << 32)), ((1 << 32, 0), (0, 1 << 32)), ((3, 9), (-3, 9)), ((1 << 62, 4), (1 << 61, 4)),
    ],
)  # fmt: skip
def test_noise_of_close_counters_is_uncorrelated(a, b):
    correlation = torch.corrcoef(torch.stack((noise(*a), noise(*b))))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(4096)


@pytest.mark.parametrize("lag", [1, 2, 64, 256])
def test_noise_of_close_tokens_is_uncorrelated(lag):
    values = noise(11, 22, 1 << 16)
    correlation = torch.corrcoef(torch.stack((values[:-lag], values[lag:])))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(1 << 16)


def test_noise_is_gumbel_distributed_and_finite():
    values = noise(1, 2, 1 << 18)
    assert values.isfinite().all()
    assert values.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert (values > 0).float().mean().item() == pytest.approx(1 - math.exp(-1), abs=0.005)


def test_every_bit_of_seed_and_position_changes_both_key_words():
    base = row_keys(torch.tensor([123]), torch.tensor([456]))
    for bit in range(64):
        flip = torch.tensor([1]) << bit
        for changed in (row_keys(123 ^ flip, torch.tensor([456])), row_keys(torch.tensor([123]), 456 ^ flip)):
            for before, after in zip(base[:, 0].tolist(), changed[:, 0].tolist(), strict=True):
                assert 4 <= ((before ^ after) & 0xFFFFFFFF).bit_count() <= 28
