"""The persistent batch: device-side columns with one row for each slot.

The main thread only stages writes (arrays packed into a step's host buffer). The tensors are read and written
by launched work alone, in the order of the plans, so a slot can be given to a new request while a step of
its previous owner is still running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.staged_write import staged_write
from .host_ring import Field, HostBuffer, HostUpload
from .messages import NewRequest, StepPlan


@dataclass(frozen=True)
class Segments:
    """Variable-length rows to write. starts: int32 [m], all 0. offsets: int32 [m + 1] into values."""

    starts: Field
    offsets: Field
    values: Field
    max_len: int


@dataclass(frozen=True)
class Admissions:
    """slots: int32 [m]. counts: int32 [4, m], the rows prefill_len, num_prompt, num_tokens, num_computed."""

    slots: Field
    counts: Field
    tokens: Segments
    blocks: Segments


@dataclass(frozen=True)
class Appends:
    """int32 [m] each: block `blocks[j]` goes to block_table[slots[j], index[j]]."""

    slots: Field
    index: Field
    blocks: Field


class BatchState:
    """all_token_ids: int32 [slots, max_model_len], known tokens. prefill_len, num_prompt, num_tokens,
    num_computed: int32 [slots]. last_sampled: int32 [slots, 1]. draft_tokens: int32 [slots, 1].
    block_table: int32 [slots, max_blocks]."""

    def __init__(self, device: torch.device, num_slots: int, max_model_len: int, block_size: int) -> None:
        def column(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.block_size = block_size
        self.all_token_ids = column(num_slots, max_model_len)
        self.prefill_len = column(num_slots)
        self.num_prompt = column(num_slots)
        self.num_tokens = column(num_slots)
        self.num_computed = column(num_slots)
        self.last_sampled = column(num_slots, 1)
        self.draft_tokens = column(num_slots, 1)
        self.block_table = column(num_slots, -(-max_model_len // block_size))

    def stage_admissions(self, requests: Sequence[NewRequest], buffer: HostBuffer) -> Admissions:
        prefill = [len(r.token_ids) for r in requests]
        counts = [prefill, [r.num_prompt for r in requests], prefill, [r.num_computed for r in requests]]
        return Admissions(
            slots=buffer.add(np.array([r.slot for r in requests], np.int32)),
            counts=buffer.add(np.array(counts, np.int32)),
            tokens=stage_segments([r.token_ids for r in requests], buffer),
            blocks=stage_segments([r.blocks for r in requests], buffer),
        )

    def admit(self, staged: Admissions, upload: HostUpload) -> None:
        """Launched work: every column of the rows is overwritten, so freed slots need no clean-up."""
        slots = upload[staged.slots]
        write_segments(self.all_token_ids, slots, staged.tokens, upload)
        write_segments(self.block_table, slots, staged.blocks, upload)
        rows = slots.long()
        columns = (self.prefill_len, self.num_prompt, self.num_tokens, self.num_computed)
        for column, values in zip(columns, upload[staged.counts], strict=True):
            column.index_copy_(0, rows, values)
        self.last_sampled.index_fill_(0, rows, 0)
        self.draft_tokens.index_fill_(0, rows, 0)

    def stage_appends(self, plan: StepPlan, buffer: HostBuffer) -> Appends:
        return Appends(
            slots=buffer.add(plan.append_slots.astype(np.int64)),
            index=buffer.add(plan.append_index.astype(np.int64)),
            blocks=buffer.add(plan.append_blocks),
        )

    def append_blocks(self, staged: Appends, upload: HostUpload) -> None:
        """Launched work."""
        self.block_table[upload[staged.slots], upload[staged.index]] = upload[staged.blocks]


def stage_segments(values: Sequence[np.ndarray], buffer: HostBuffer) -> Segments:
    """values: int32 or float32 [..] each, at least one array."""
    lengths = [len(v) for v in values]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return Segments(
        starts=buffer.add(np.zeros(len(values), np.int32)),
        offsets=buffer.add(offsets),
        values=buffer.add(np.concatenate(values)),
        max_len=max(lengths),
    )


def write_segments(target: torch.Tensor, slots: torch.Tensor, staged: Segments, upload: HostUpload) -> None:
    """Launched work. target: [slots, cols]. slots: int32 [m]. Segment j goes to target[slots[j], 0:]."""
    if staged.max_len:
        staged_write(
            target, slots, upload[staged.starts], upload[staged.offsets], upload[staged.values], staged.max_len
        )
