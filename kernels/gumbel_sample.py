"""Draws a token from softmax(logits / temperature) by the Gumbel-max trick, with counter-based noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._triton import ceil_div, kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl

_TOKEN_STEP = -1640531535  # 0x9E3779B1, 2^32 over the golden ratio
_MIX_1 = -2048144789  # 0x85EBCA6B, murmur3's finaliser
_MIX_2 = -1028477387  # 0xC2B2AE35
_LANES = (608135816, -2052912941)  # 0x243F6A88, 0x85A308D3: digits of pi, one start for each key word
_CACHED_ELEMENTS = 1 << 17


def gumbel_sample(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """argmax over tokens of logits + temperature * Gumbel noise: a sample of softmax(logits / temperature).

    The noise of a row depends on its seed, its position and the token id alone, so neither the other
    rows nor the row's place change what is drawn. At temperature 0 this is the first maximum. A logit of
    -inf is never drawn, unless the whole row is -inf (then token 0).

    logits: float32 [n, vocab]. temperature: float32 [n], pass 1 for a row that is already divided by its
    temperature. seeds, positions: int64 [n]. Returns int32 [n].
    """
    function = gumbel_sample_triton if logits.is_cuda else gumbel_sample_reference
    return function(logits, temperature, seeds, positions)


def gumbel_sample_reference(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """For CPU tensors: it reads temperatures on the host, to make no noise for greedy rows.

    Takes few rows at a time, so that the dozen passes over a row find it in the CPU's cache.
    """
    n, vocab = logits.shape
    random = temperature.numpy() > 0
    if not random.any():
        return logits.argmax(-1).int()
    keys = row_keys(seeds, positions)
    tokens = torch.arange(vocab, dtype=torch.int32) * _TOKEN_STEP
    sampled = torch.empty(n, dtype=torch.int32)
    step = max(1, _CACHED_ELEMENTS // vocab)
    for begin in range(0, n, step):
        part = slice(begin, begin + step)
        scores = logits[part]
        if random[part].any():
            scores = torch.addcmul(scores, gumbel_noise(keys[:, part], tokens), temperature[part].unsqueeze(1))
        sampled[part] = scores.argmax(-1)
    return sampled


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int32 [2, n]: two words for each row that depend on all 128 bits of its seed and position."""
    keys = torch.tensor(_LANES, dtype=torch.int32).unsqueeze(1)
    for word in (seeds, seeds >> 32, positions, positions >> 32):
        keys = _mix(keys ^ word.int())
    return keys


def gumbel_noise(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """keys: int32 [2, n]. tokens: int32 [vocab], ids times _TOKEN_STEP. Returns float32 [n, vocab]."""
    x = tokens + keys[0].unsqueeze(1)
    shifted = torch.empty_like(x)
    _xor_shift(x, 16, shifted)
    x.mul_(_MIX_1).add_(keys[1].unsqueeze(1))
    _xor_shift(x, 13, shifted)
    x.mul_(_MIX_2)
    bits = x.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).clamp_(min=1)
    return bits.float().mul_(2.0**-24).log_().neg_().log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """murmur3's 32-bit finaliser: every bit of x changes every bit of the result half the time."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _MIX_1
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * _MIX_2
    return x ^ ((x >> 16) & 0xFFFF)


def _xor_shift(x: torch.Tensor, bits: int, shifted: torch.Tensor) -> None:
    """x ^= x >> bits, the shift unsigned (torch's is signed on int32)."""
    torch.bitwise_right_shift(x, bits, out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - bits)) - 1))


def gumbel_sample_triton(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    n, vocab = logits.shape
    block = 2048
    num_blocks = ceil_div(vocab, block)
    best = torch.empty((n, num_blocks), dtype=torch.float32, device=logits.device)
    best_token = torch.empty((n, num_blocks), dtype=torch.int32, device=logits.device)
    sampled = torch.empty(n, dtype=torch.int32, device=logits.device)
    if n:
        _block_best_kernel[(n, num_blocks)](
            logits, temperature, seeds, positions, best, best_token, logits.stride(0), vocab, num_blocks,
            BLOCK=block, num_warps=4,
        )  # fmt: skip
        _row_best_kernel[(n,)](best, best_token, sampled, num_blocks, BLOCK=next_power_of_2(num_blocks), num_warps=1)
    return sampled


@kernel(do_not_specialize=("temperature", "seeds", "positions"))
def _block_best_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    best: tl.tensor,
    best_token: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * stride + token, mask=token < vocab, other=-float("inf"))
    heat = tl.load(temperature + row)
    if heat > 0:
        score += heat * _noise(token, tl.load(seeds + row), tl.load(positions + row))
    value, index = tl.max(score, axis=0, return_indices=True)
    tl.store(best + row * num_blocks + block, value)
    # A row of NaN could choose the padding behind the vocabulary.
    tl.store(best_token + row * num_blocks + block, tl.minimum(block * BLOCK + index, vocab - 1))


@kernel()
def _row_best_kernel(
    best: tl.tensor, best_token: tl.tensor, sampled: tl.tensor, num_blocks: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    value = tl.load(best + row * num_blocks + block, mask=block < num_blocks, other=-float("inf"))
    winner = tl.minimum(tl.argmax(value, axis=0), num_blocks - 1)
    tl.store(sampled + row, tl.load(best_token + row * num_blocks + winner))


@kernel()
def _noise(token: tl.tensor, seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """gumbel_noise of row_keys, bit for bit up to the logarithm."""
    x = token.to(tl.uint32) * 0x9E3779B1 + _row_key(seed, position, 0x243F6A88)
    x = (x ^ (x >> 16)) * 0x85EBCA6B + _row_key(seed, position, 0x85A308D3)
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    uniform = tl.maximum(x >> 8, 1).to(tl.float32) * 5.9604644775390625e-08
    return -tl.log(-tl.log(uniform))


@kernel()
def _row_key(seed: tl.tensor, position: tl.tensor, LANE: tl.constexpr) -> tl.tensor:
    key = _mix_bits(seed.to(tl.uint32) ^ LANE)
    key = _mix_bits(key ^ (seed >> 32).to(tl.uint32))
    key = _mix_bits(key ^ position.to(tl.uint32))
    return _mix_bits(key ^ (position >> 32).to(tl.uint32))


@kernel()
def _mix_bits(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
