"""Runs a model as the model runner would: rows of tokens over KV blocks that lie scattered in the pool."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from stepahead.worker.attention import AttentionMetadata
from stepahead.worker.models.base import Model

MAX_BLOCKS = 32


class PagedRun:
    """tokens: what each row has computed so far. Blocks are handed out in a shuffled order."""

    def __init__(self, model: Model, num_rows: int = 1, block_size: int = 4, seed: int = 0) -> None:
        self.model = model
        self.block_size = block_size
        self.computed = [0] * num_rows
        num_blocks = num_rows * MAX_BLOCKS
        self.kv_cache = model.allocate_kv_cache(num_blocks, block_size)
        blocks = list(range(num_blocks))
        random.Random(seed).shuffle(blocks)
        self.block_tables = torch.tensor(blocks, dtype=torch.int32).view(num_rows, MAX_BLOCKS)

    def step(self, new_tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """One step in which row i computes new_tokens[i]. Returns each row's logits [len(new_tokens[i]), vocab]."""
        counts = [len(tokens) for tokens in new_tokens]
        positions, slot_mapping = [], []
        for row, count in enumerate(counts):
            for position in range(self.computed[row], self.computed[row] + count):
                block = int(self.block_tables[row, position // self.block_size])
                positions.append(position)
                slot_mapping.append(block * self.block_size + position % self.block_size)
            self.computed[row] += count
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        attention = AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(self.computed, dtype=torch.int32),
            block_tables=self.block_tables,
            slot_mapping=torch.tensor(slot_mapping),
            max_query_len=max(counts),
            max_seq_len=max(self.computed),
        )
        ids = torch.tensor([token for tokens in new_tokens for token in tokens], dtype=torch.int32)
        hidden = self.model.forward(ids, torch.tensor(positions), self.kv_cache, attention)
        return list(self.model.compute_logits(hidden).split(counts))
