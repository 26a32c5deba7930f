"""Rotary position embedding, halves rotated (GPT-NeoX and Hugging Face layout)."""

from __future__ import annotations

import torch


def apply_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotates q and k in place: pair (i, i + d/2) by the angle of its token's position, in float32.

    q: [t, heads, d], k: [t, kv_heads, d], views into a fused projection allowed (d contiguous).
    positions: int64 [t]. cos_sin: float32 [max_position, d], d/2 cosines, then d/2 sines.
    """
    apply_rope_reference(q, k, positions, cos_sin)


def apply_rope_reference(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        rotated = first * cos - second * sin, second * cos + first * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])
