"""The gate of a gated MLP: silu(gate) * up, from one fused projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ._numba import NumbaKernel, runs_in_numba
from ._triton import ceil_div, kernel

if TYPE_CHECKING:
    import triton.language as tl

    from . import _numba_language as nl


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [t, 2 * i], the gate's half first. Returns [t, i]."""
    if x.is_cuda:
        return silu_and_mul_triton(x)
    return silu_and_mul_numba(x) if runs_in_numba(x, x.shape[1] // 2) else silu_and_mul_reference(x)


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


def silu_and_mul_numba(x: torch.Tensor) -> torch.Tensor:
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=x.dtype)
    words = x.data_ptr(), out.data_ptr(), x.stride(0), width
    _silu_and_mul_loop.launch(x.dtype, words, num_tokens, num_tokens * width, {})
    return out


@NumbaKernel
def _silu_and_mul_loop(args: nl.Args) -> None:
    x, out = nl.elements(args, 0), nl.elements(args, 1)
    stride, width = nl.integer(args, 2), nl.integer(args, 3)
    token = nl.next_task(args)
    while token >= 0:
        for i in range(0, width, 16):
            # Rounded to x's dtype between the two steps, as torch does.
            silu = nl.rounded(out, nl.silu(nl.load(x, token * stride + i)))
            nl.store(out, token * width + i, silu * nl.load(x, token * stride + width + i))
        token = nl.next_task(args)
