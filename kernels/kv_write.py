"""Stores a step's keys and values in the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ._numba import NumbaKernel, runs_in_numba
from ._triton import kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl

    from . import _numba_language as nl


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes token i to place slot_mapping[i] = block * block_size + offset of both caches; -1 skips it.

    k, v: [t, kv_heads, d], views into a fused projection allowed (d contiguous).
    k_cache, v_cache: [blocks, block_size, kv_heads, d], contiguous. slot_mapping: int64 [t].
    """
    if k.is_cuda:
        function = kv_write_triton
    else:
        function = kv_write_numba if runs_in_numba(k, k.shape[1] * k.shape[2]) else kv_write_reference
    function(k, v, k_cache, v_cache, slot_mapping)


def kv_write_reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """For CPU tensors: it looks for skipped tokens on the host."""
    kept = np.flatnonzero(slot_mapping.numpy() >= 0)
    if len(kept) < slot_mapping.shape[0]:
        index = torch.from_numpy(kept)
        k, v, slot_mapping = k[index], v[index], slot_mapping[index]
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


def kv_write_triton(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    k, v = k.flatten(1), v.flatten(1)
    num_tokens, width = k.shape
    if num_tokens:
        _kv_write_kernel[(num_tokens,)](
            k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0), width,
            BLOCK=next_power_of_2(width), num_warps=4,
        )  # fmt: skip


@kernel(do_not_specialize=("slot_mapping",))
def _kv_write_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slot_mapping + token)
    if place >= 0:
        column = tl.arange(0, BLOCK)
        inside = column < width
        key = tl.load(k + token * k_stride + column, mask=inside)
        value = tl.load(v + token * v_stride + column, mask=inside)
        tl.store(k_cache + place * width + column, key, mask=inside)
        tl.store(v_cache + place * width + column, value, mask=inside)


def kv_write_numba(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    num_tokens, kv_heads, dim = k.shape
    width = kv_heads * dim
    if not k.stride(1) == v.stride(1) == dim:
        k, v = k.contiguous(), v.contiguous()
    words = (
        k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slot_mapping.data_ptr(),
        k.stride(0), v.stride(0), width,
    )  # fmt: skip
    _kv_write_loop.launch(k.dtype, words, num_tokens, num_tokens * width, {})


@NumbaKernel
def _kv_write_loop(args: nl.Args) -> None:
    k, v = nl.elements(args, 0), nl.elements(args, 1)
    k_cache, v_cache, slot_mapping = nl.elements(args, 2), nl.elements(args, 3), nl.int64s(args, 4)
    k_stride, v_stride, width = nl.integer(args, 5), nl.integer(args, 6), nl.integer(args, 7)
    token = nl.next_task(args)
    while token >= 0:
        place = slot_mapping[token]
        if place >= 0:
            for i in range(0, width, 16):
                nl.store(k_cache, place * width + i, nl.load(k, token * k_stride + i))
                nl.store(v_cache, place * width + i, nl.load(v, token * v_stride + i))
        token = nl.next_task(args)
