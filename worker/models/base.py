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
    """Constructed as Model(config: ModelConfig, dtype: torch.dtype, device: torch.device, group: ParallelGroup)."""

    def kv_bytes_per_block(self, block_size: int) -> int: ...

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KVCache: ...

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, attention: AttentionMetadata
    ) -> torch.Tensor:
        """input_ids: int32 [t]. positions: int64 [t]. Returns hidden states [t, hidden]."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [m, hidden]. Returns [m, vocab_size], float32 or the model's dtype."""

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every checkpoint tensor that load_weights wants, by name, with its whole shape; {} for none."""

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]]) -> None:
        """A model without weights does not touch `weights`, so no file need exist.

        Raises: ConfigError naming a missing, unexpected or misshapen weight."""
