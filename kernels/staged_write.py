"""Many short writes into a per-slot table as one operation, in stream order with the steps that read it."""

from __future__ import annotations

import torch


def staged_write(
    target: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    max_len: int,
) -> None:
    """target[rows[j], starts[j] + i] = values[offsets[j] + i] for every i below offsets[j + 1] - offsets[j].

    target: [num_rows, num_cols], contiguous. rows, starts: int32 [m]. offsets: int32 [m + 1], offsets[0] = 0.
    values: at least offsets[m] of target's dtype. max_len: host-side upper bound of a segment's length.
    No cell may be written twice in one call.
    """
    staged_write_reference(target, rows, starts, offsets, values, max_len)


def staged_write_reference(
    target: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    max_len: int,
) -> None:
    """For CPU tensors: it reads the number of values on the host."""
    total = int(offsets.numpy()[-1])
    segment = torch.repeat_interleave(offsets.diff(), output_size=total)
    column = starts[segment] + torch.arange(total) - offsets[segment]
    target.index_put_((rows[segment].long(), column), values[:total])
