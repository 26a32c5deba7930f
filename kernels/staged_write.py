"""Many short writes into a per-slot table as one operation, in stream order with the steps that read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._triton import ceil_div, kernel

if TYPE_CHECKING:
    import triton.language as tl


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
    function = staged_write_triton if target.is_cuda else staged_write_reference
    function(target, rows, starts, offsets, values, max_len)


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


def staged_write_triton(
    target: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
    max_len: int,
) -> None:
    if rows.shape[0] and max_len:
        block = 256
        _staged_write_kernel[(rows.shape[0], ceil_div(max_len, block))](
            target, rows, starts, offsets, values, target.stride(0), BLOCK=block, num_warps=2
        )


@kernel(do_not_specialize=("rows", "starts", "offsets", "values"))
def _staged_write_kernel(
    target: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    offsets: tl.tensor,
    values: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    segment = tl.program_id(0)
    begin = tl.load(offsets + segment)
    length = tl.load(offsets + segment + 1) - begin
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = target + tl.load(rows + segment).to(tl.int64) * stride + tl.load(starts + segment)
    tl.store(place + i, tl.load(values + begin + i, mask=i < length), mask=i < length)
