"""Products with packed weights equal float32's, rounded once, whatever the number of tokens."""

import pytest
import torch
import torch.nn.functional as F

from stepahead.kernels.linear import gated_linear, linear, pack_weight
from stepahead.kernels.linear_tiles import TileWeight, fits_tiles, to_tiles

# One tile of tokens or less, two, a third begun; more than a chunk.
TOKENS = [0, 1, 5, 16, 17, 32, 33, 100, 545]
BF16 = torch.bfloat16


def needs_tiles() -> None:
    pytest.importorskip("numba")
    if not fits_tiles(torch.empty(32, 32, dtype=BF16)):
        pytest.skip("this CPU has no AMX for bfloat16, or Linux does not allow it")


def operands(tokens: int, in_features: int, out_features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(BF16)
    return torch.randn(tokens, in_features).to(BF16), weight, torch.randn(out_features).to(BF16)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.float(), theirs, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("in_features", "out_features"), [(32, 32), (576, 960), (1536, 96)])
def test_a_packed_weight_multiplies_like_the_matrix(in_features, out_features, tokens, has_bias):
    x, weight, bias = operands(tokens, in_features, out_features)
    result = linear(x, pack_weight(weight.clone()), bias if has_bias else None)
    assert result.shape == (tokens, out_features)
    assert result.dtype == BF16
    close(result, exact(x, weight, bias if has_bias else None))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_gate_is_the_product_of_its_halves(tokens, has_bias):
    x, weight, bias = operands(tokens, 96, 192)
    result = gated_linear(x, pack_weight(weight.clone(), gated=True), bias if has_bias else None)
    gate, up = exact(x, weight, bias if has_bias else None).to(BF16).chunk(2, dim=1)
    assert result.shape == (tokens, 96)
    close(result, F.silu(gate).float() * up.float())


def test_weights_that_do_not_divide_into_tiles_are_multiplied_too():
    x, weight, _ = operands(7, 40, 72)
    close(linear(x, pack_weight(weight.clone())), exact(x, weight, None))
    gate, up = exact(x, weight, None).to(BF16).chunk(2, dim=1)
    close(gated_linear(x, pack_weight(weight.clone(), gated=True)), F.silu(gate).float() * up.float())


def test_float32_weights_stay_as_they_are():
    weight = torch.randn(64, 64)
    assert pack_weight(weight) is weight


def test_tiles_take_inputs_that_are_part_of_something_wider():
    needs_tiles()
    x, weight, _ = operands(40, 64, 64)
    wide = torch.randn(40, 200).to(BF16)
    wide[:, 32:96] = x
    packed = pack_weight(weight)
    assert isinstance(packed, TileWeight)
    assert torch.equal(linear(wide[:, 32:96], packed), linear(x, packed))
    assert torch.equal(linear(x.t().contiguous().t(), packed), linear(x, packed))


@pytest.mark.parametrize("gated", [False, True])
def test_a_token_gets_the_same_bits_alone_and_among_others(gated):
    needs_tiles()
    x, weight, bias = operands(600, 576, 128)
    packed = to_tiles(weight, gated)
    multiply = gated_linear if gated else linear
    together = multiply(x, packed, bias)
    for tokens in (slice(0, 1), slice(3, 20), slice(511, 540), slice(599, 600)):
        assert torch.equal(multiply(x[tokens], packed, bias), together[tokens])


def test_what_other_tokens_hold_does_not_get_in():
    needs_tiles()
    x, weight, _ = operands(21, 64, 64)
    packed = to_tiles(weight, gated=False)
    among_nans = linear(torch.cat((x, torch.full((64, 64), torch.nan, dtype=BF16))), packed)
    assert torch.equal(linear(x, packed), among_nans[:21])
    assert among_nans[21:].isnan().all()


def test_a_weight_packed_for_a_gate_is_no_plain_one():
    needs_tiles()
    x, weight, _ = operands(3, 64, 64)
    with pytest.raises(AssertionError):
        linear(x, to_tiles(weight, gated=True))
    with pytest.raises(AssertionError):
        gated_linear(x, to_tiles(weight, gated=False))
    with pytest.raises(AssertionError):
        linear(x[:, :32].contiguous(), to_tiles(weight, gated=False))
