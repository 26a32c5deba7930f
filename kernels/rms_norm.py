"""Root-mean-square normalisation, alone or after adding the residual stream."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ._numba import NumbaKernel, float_word, runs_in_numba
from ._triton import kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl

    from . import _numba_language as nl


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, normalised in float32.

    x: [.., h]. weight: [h]. Rounds to x's dtype before the weight is applied, as Llama does.
    """
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps)
    return rms_norm_numba(x, weight, eps) if runs_in_numba(x, x.shape[-1]) else rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(x + residual), x + residual); all [.., h]."""
    if x.is_cuda:
        function = add_rms_norm_triton
    else:
        function = add_rms_norm_numba if runs_in_numba(x, x.shape[-1]) else add_rms_norm_reference
    return function(x, residual, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * inverse).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.dim() == 3 and x.stride(2) == 1 else x.reshape(-1, 1, x.shape[-1])
    _launch(rows, rows, weight, eps, out, out, has_residual=False)
    return out


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rows = x.reshape(-1, 1, x.shape[-1])
    _launch(rows, residual.reshape(rows.shape), weight, eps, out, total, has_residual=True)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor,
    has_residual: bool,
) -> None:
    """x: [outer, inner, h], two strides, so that heads inside a fused projection need no copy."""
    outer, inner, width = x.shape
    if outer * inner == 0:
        return
    block = next_power_of_2(width)
    _rms_norm_kernel[(outer * inner,)](
        x, residual, weight, out, total, eps, inner, x.stride(0), x.stride(1), residual.stride(0), width,
        HAS_RESIDUAL=has_residual, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip


@kernel()
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    eps: tl.tensor,
    inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    residual_stride: tl.tensor,
    width: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    source = x + (row // inner) * outer_stride + (row % inner) * inner_stride
    # Each product and sum is taken in float32 and rounded to x's dtype, as torch does.
    wide = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * width + column, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * inverse).to(out.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm_numba(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    rows = x if x.dim() == 3 and x.stride(2) == 1 else x.reshape(-1, 1, x.shape[-1])
    outer, inner, width = rows.shape
    words = x.data_ptr(), weight.data_ptr(), out.data_ptr(), *rows.stride()[:2], inner, width, float_word(eps)
    _rms_norm_loop.launch(x.dtype, words, outer * inner, x.numel(), {})
    return out


def add_rms_norm_numba(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    words = (
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(), width, float_word(eps)
    )  # fmt: skip
    _add_rms_norm_loop.launch(x.dtype, words, x.numel() // width, x.numel(), {})
    return out, total


@NumbaKernel
def _rms_norm_loop(args: nl.Args) -> None:
    x, weight, out = nl.elements(args, 0), nl.elements(args, 1), nl.elements(args, 2)
    outer_stride, inner_stride, inner = nl.integer(args, 3), nl.integer(args, 4), nl.integer(args, 5)
    width, eps = nl.integer(args, 6), nl.real(args, 7)
    row = nl.next_task(args)
    while row >= 0:
        source, target = row // inner * outer_stride + row % inner * inner_stride, row * width
        squares = nl.splat(0.0)
        for i in range(0, width, 16):
            value = nl.load(x, source + i)
            squares = nl.fma(value, value, squares)
        inverse = nl.splat(1.0 / math.sqrt(nl.sum_of(squares) / width + eps))
        for i in range(0, width, 16):
            normed = nl.rounded(out, nl.load(x, source + i) * inverse)
            nl.store(out, target + i, normed * nl.load(weight, i))
        row = nl.next_task(args)


@NumbaKernel
def _add_rms_norm_loop(args: nl.Args) -> None:
    x, residual, weight = nl.elements(args, 0), nl.elements(args, 1), nl.elements(args, 2)
    out, total = nl.elements(args, 3), nl.elements(args, 4)
    width, eps = nl.integer(args, 5), nl.real(args, 6)
    row = nl.next_task(args)
    while row >= 0:
        at = row * width
        squares = nl.splat(0.0)
        for i in range(0, width, 16):
            value = nl.rounded(total, nl.load(x, at + i) + nl.load(residual, at + i))
            nl.store(total, at + i, value)
            squares = nl.fma(value, value, squares)
        inverse = nl.splat(1.0 / math.sqrt(nl.sum_of(squares) / width + eps))
        for i in range(0, width, 16):
            normed = nl.rounded(out, nl.load(total, at + i) * inverse)
            nl.store(out, at + i, normed * nl.load(weight, i))
        row = nl.next_task(args)
