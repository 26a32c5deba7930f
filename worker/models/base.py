"""The face every model shows to the model runner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from ..attention import AttentionMetadata
from ..weights import WeightSource

KVCache = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer (k, v), each [num_blocks, block_size, num_kv_heads, head_dim]."""


class Model(Protocol):
    """Constructed as Model(config: ModelConfig, dtype: torch.dtype, device: torch.device, group: ParallelGroup,
    stage: PipelineStage = the only one): the stage's layers, and of those one tensor-parallel rank's part.

    hidden: width and dtype of what one stage hands to the next.
    """

    hidden: tuple[int, torch.dtype]

    def kv_bytes_per_block(self, block_size: int) -> int: ...

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KVCache: ...

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, attention: AttentionMetadata
    ) -> torch.Tensor:
        """inputs: int32 [t], token ids, on the first stage; on others what the stage before returned.
        positions: int64 [t]. Returns hidden states [t, hidden]."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [m, hidden]. Returns [m, vocab_size], float32 or the model's dtype, the same on every rank. Of the
        last stage only."""

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every checkpoint tensor that this stage wants, by name, with its whole shape; {} for none."""

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]]) -> None:
        """Reads this rank's part of each, and nothing of other stages'. A model without weights does not touch
        `weights`, so no file need exist.

        Raises: ConfigError naming a missing, unexpected or misshapen weight."""
