"""Stores a step's keys and values in the paged KV cache."""

from __future__ import annotations

import numpy as np
import torch


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes token i to place slot_mapping[i] = block * block_size + offset of both caches; -1 skips it.

    k, v: [t, kv_heads, d], views into a fused projection allowed (d contiguous).
    k_cache, v_cache: [blocks, block_size, kv_heads, d], contiguous. slot_mapping: int64 [t].
    """
    kv_write_reference(k, v, k_cache, v_cache, slot_mapping)


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
