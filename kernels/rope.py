"""Rotary position embedding, halves rotated (GPT-NeoX and Hugging Face layout)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._triton import kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl


def apply_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotates q and k in place: pair (i, i + d/2) by the angle of its token's position, in float32.

    q: [t, heads, d], k: [t, kv_heads, d], views into a fused projection allowed (d contiguous).
    positions: int64 [t]. cos_sin: float32 [max_position, d], d/2 cosines, then d/2 sines.
    """
    function = apply_rope_triton if q.is_cuda else apply_rope_reference
    function(q, k, positions, cos_sin)


def apply_rope_reference(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        rotated = first * cos - second * sin, second * cos + first * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])


def apply_rope_triton(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    num_tokens, heads, dim = q.shape
    if num_tokens == 0:
        return
    _rope_kernel[(num_tokens,)](
        q, k, positions, cos_sin, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        HEADS=heads, KV_HEADS=k.shape[1], HALF=dim // 2,
        HEADS_PAD=next_power_of_2(heads), KV_HEADS_PAD=next_power_of_2(k.shape[1]), HALF_PAD=next_power_of_2(dim // 2),
        num_warps=4,
    )  # fmt: skip


@kernel(do_not_specialize=("positions",))
def _rope_kernel(
    q: tl.tensor,
    k: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PAD)
    angle = cos_sin + tl.load(positions + token) * (2 * HALF) + pair
    cos = tl.load(angle, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0)[None, :]
    _rotate(q + token * q_token_stride, q_head_stride, pair, cos, sin, HEADS, HEADS_PAD, HALF)
    _rotate(k + token * k_token_stride, k_head_stride, pair, cos, sin, KV_HEADS, KV_HEADS_PAD, HALF)


@kernel()
def _rotate(
    x: tl.tensor,
    head_stride: tl.tensor,
    pair: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    head = tl.arange(0, HEADS_PAD)
    place = x + head[:, None] * head_stride + pair[None, :]
    inside = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (first * cos - second * sin).to(x.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (second * cos + first * sin).to(x.dtype.element_ty), mask=inside)
