"""Draws a token from softmax(logits / temperature) by the Gumbel-max trick, with counter-based noise."""

from __future__ import annotations

import torch

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
    return gumbel_sample_reference(logits, temperature, seeds, positions)


def gumbel_sample_reference(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Takes few rows at a time, so that the dozen passes over a row find it in the CPU's cache."""
    n, vocab = logits.shape
    if not logits.is_cuda and not temperature.numpy().any():
        return logits.argmax(-1).int()
    keys = row_keys(seeds, positions)
    tokens = torch.arange(vocab, dtype=torch.int32, device=logits.device) * _TOKEN_STEP
    sampled = torch.empty(n, dtype=torch.int32, device=logits.device)
    step = max(1, _CACHED_ELEMENTS // vocab)
    for begin in range(0, n, step):
        part = slice(begin, begin + step)
        noise = gumbel_noise(keys[:, part], tokens)
        sampled[part] = torch.addcmul(logits[part], noise, temperature[part].unsqueeze(1)).argmax(-1)
    return sampled


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int32 [2, n]: two words for each row that depend on all 128 bits of its seed and position."""
    keys = torch.tensor(_LANES, dtype=torch.int32, device=seeds.device).unsqueeze(1)
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
