"""The gate of a gated MLP: silu(gate) * up, from one fused projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ._triton import ceil_div, kernel

if TYPE_CHECKING:
    import triton.language as tl


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [t, 2 * i], the gate's half first. Returns [t, i]."""
    function = silu_and_mul_triton if x.is_cuda else silu_and_mul_reference
    return function(x)


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def silu_and_mul_triton(x: torch.Tensor) -> torch.Tensor:
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if num_tokens:
        block = 1024
        _silu_and_mul_kernel[(num_tokens, ceil_div(width, block))](x, out, x.stride(0), width, BLOCK=block, num_warps=4)
    return out


@kernel()
def _silu_and_mul_kernel(
    x: tl.tensor, out: tl.tensor, stride: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    # Rounded to x's dtype between the two steps, as torch does.
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * width + column, (silu * up).to(out.dtype.element_ty), mask=inside)
