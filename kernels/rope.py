"""Rotary position embedding, halves rotated (GPT-NeoX and Hugging Face layout)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._numba import NumbaFunction, NumbaKernel, runs_in_numba
from ._triton import kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl

    from . import _numba_language as nl


def apply_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotates q and k in place: pair (i, i + d/2) by the angle of its token's position, in float32.

    q: [t, heads, d], k: [t, kv_heads, d], views into a fused projection allowed (d contiguous).
    positions: int64 [t]. cos_sin: float32 [max_position, d], d/2 cosines, then d/2 sines.
    """
    if q.is_cuda:
        function = apply_rope_triton
    else:
        function = apply_rope_numba if runs_in_numba(q, q.shape[2] // 2) else apply_rope_reference
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


def apply_rope_numba(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    num_tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    words = (
        q.data_ptr(), k.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(),
        *q.stride()[:2], *k.stride()[:2], heads, kv_heads,
    )  # fmt: skip
    _rope_loop.launch(q.dtype, words, num_tokens, num_tokens * (heads + kv_heads) * dim, {"half": dim // 2})


@NumbaKernel
def _rope_loop(args: nl.Args) -> None:
    q, k = nl.elements(args, 0), nl.elements(args, 1)
    positions, cos_sin = nl.int64s(args, 2), nl.float32s(args, 3)
    q_token_stride, q_head_stride, k_token_stride, k_head_stride = (
        nl.integer(args, 4), nl.integer(args, 5), nl.integer(args, 6), nl.integer(args, 7)
    )  # fmt: skip
    heads, kv_heads, half = nl.integer(args, 8), nl.integer(args, 9), nl.constant(args, "half")
    token = nl.next_task(args)
    while token >= 0:
        angle = positions[token] * 2 * half
        for i in range(0, half, 16):
            cos, sin = nl.load(cos_sin, angle + i), nl.load(cos_sin, angle + half + i)
            for head in range(heads):
                _rotate_lanes(q, token * q_token_stride + head * q_head_stride + i, half, cos, sin)
            for head in range(kv_heads):
                _rotate_lanes(k, token * k_token_stride + head * k_head_stride + i, half, cos, sin)
        token = nl.next_task(args)


@NumbaFunction
def _rotate_lanes(x: nl.Pointer, at: int, half: int, cos: nl.Vector, sin: nl.Vector) -> None:
    first, second = nl.load(x, at), nl.load(x, at + half)
    nl.store(x, at, first * cos - second * sin)
    nl.store(x, at + half, second * cos + first * sin)
