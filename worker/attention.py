"""What attention needs to know about a step, passed to every layer by hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionMetadata:
    """t tokens in n rows, row after row. All tensors on the device.

    query_start: int32 [n + 1], row i owns tokens query_start[i] .. query_start[i + 1].
    seq_lens: int32 [n], context length of each row after this step (computed + query).
    block_tables: int32 [n, max_blocks], KV blocks of each row; only the first
    ceil(seq_len / block_size) entries mean anything.
    slot_mapping: int64 [t], where each token's K and V go: block * block_size + offset.
    max_query_len, max_seq_len: host-side upper bounds over the rows.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
