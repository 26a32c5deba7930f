"""Multiplication by a weight matrix, alone or as the gate of an MLP."""

from __future__ import annotations

import functools
from typing import TypeAlias

import torch
import torch.nn.functional as F

from .linear_tiles import TileWeight, fits_tiles, linear_tiles, to_tiles
from .silu_and_mul import silu_and_mul

Weight: TypeAlias = torch.Tensor | TileWeight
"""[out, in], or what `pack_weight` made of it."""


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight^T + bias. x: [t, in]. bias: [out]. Returns [t, out]."""
    if isinstance(weight, TileWeight):
        assert not weight.gated
        return linear_tiles(x, weight, bias)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def gated_linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, where gate and up are the halves of linear(x, weight, bias). Returns [t, out / 2]."""
    if isinstance(weight, TileWeight):
        assert weight.gated
        return linear_tiles(x, weight, bias)
    return silu_and_mul(linear(x, weight, bias))


def pack_weight(weight: torch.Tensor, gated: bool = False) -> Weight:
    """The weight in the order in which the CPU multiplies by it, where that is faster; else itself.

    weight: [out, in]. gated: for gated_linear. The result is good for multiplying alone, it cannot be read otherwise.
    """
    if fits_tiles(weight):
        return to_tiles(weight, gated)
    if weight.is_cpu and weight.dtype == torch.bfloat16 and _onednn_has_bfloat16():
        return torch.ops.mkldnn._reorder_linear_weight(weight)
    return weight


@functools.cache
def _onednn_has_bfloat16() -> bool:
    """Whether this torch and this CPU have oneDNN's bfloat16 matrix products."""
    operations = torch.ops.mkldnn
    needed = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    return all(hasattr(operations, name) for name in needed) and operations._is_mkldnn_bf16_supported()
