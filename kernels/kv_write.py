"""Stores a step's keys and values in the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ._triton import kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes token i to place slot_mapping[i] = block * block_size + offset of both caches; -1 skips it.

    k, v: [t, kv_heads, d], views into a fused projection allowed (d contiguous).
    k_cache, v_cache: [blocks, block_size, kv_heads, d], contiguous. slot_mapping: int64 [t].
    """
    function = kv_write_triton if k.is_cuda else kv_write_reference
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
