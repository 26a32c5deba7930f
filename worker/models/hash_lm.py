"""A model whose next token is a hash of its whole context, for tests and for measuring overlap.

The KV cache stores token ids. A forward writes them at the slot mapping, reads the whole context back
through the block table, and hashes each token with its position: one wrong block, position or token, anywhere,
changes every later logit. All of it is integer arithmetic, so results do not depend on batch or chunks.

Each stage of a pipeline has a KV cache and does the same, in its share of the time: the hashes of stages that agree
stay what they are, others do not. Tensor-parallel ranks divide the vocabulary, not the time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from ...kernels.kv_write import kv_write
from ..attention import AttentionMetadata
from ..model_config import ModelConfig
from ..parallel import ONLY_STAGE, ParallelGroup, PipelineStage
from ..weights import WeightSource
from .base import KVCache

_TOKEN = 0x2545F4914F6CDD1D
_PLACE = -0x61C8864680B583EB  # 2^64 over the golden ratio, as int64
_MIX = -0x4B47D0C5A1A1D2C5
_VOCAB = -1640531535
_MIX_1 = -2048144789
_MIX_2 = -1028477387
_SPREAD = 8.0
"""Logits are uniform in 0 .. 8: at temperature 1 about an eighth of the vocabulary is likely."""


class HashLM:
    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        group: ParallelGroup,
        stage: PipelineStage = ONLY_STAGE,
    ) -> None:
        self.hidden = 2, torch.int64
        self._device = device
        self._group = group
        self._stage = stage
        step_ms = config.step_ms / stage.size
        self._step_seconds = step_ms / 1000
        self._vocab_size = config.vocab_size
        self._vocab = self._vocab_share(config.vocab_size) * _VOCAB
        self._sleep_cycles = 0
        if step_ms and device.type == "cuda":
            self._sleep_cycles = int(step_ms * _cycles_per_ms())

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 4 * block_size

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """One layer, int32 [num_blocks, block_size, 1, 1]; K and V are the same tensor."""
        ids = torch.zeros((num_blocks, block_size, 1, 1), dtype=torch.int32, device=self._device)
        return [(ids, ids)]

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, attention: AttentionMetadata
    ) -> torch.Tensor:
        """Returns int64 [t, 2]: the token's id, and a hash of its context."""
        began = time.monotonic()
        if self._sleep_cycles:
            torch.cuda._sleep(self._sleep_cycles)
        cache = kv_cache[0][0]
        tokens = inputs if self._stage.first else inputs[:, 0].int()
        ids = tokens.view(-1, 1, 1)
        kv_write(ids, ids, cache, cache, attention.slot_mapping)
        hashes = self._hash_contexts(cache, positions, attention)
        if not self._stage.first:
            hashes ^= (hashes ^ inputs[:, 1]) * _MIX
        if self._device.type == "cpu" and self._step_seconds:
            # Without the interpreter lock: the worker's main thread goes on, as it would beside a GPU.
            time.sleep(max(0.0, began + self._step_seconds - time.monotonic()))
        return torch.stack((tokens.long(), hashes), dim=1)

    def _hash_contexts(
        self, cache: torch.Tensor, positions: torch.Tensor, attention: AttentionMetadata
    ) -> torch.Tensor:
        num_blocks = -(-attention.max_seq_len // cache.shape[1])
        context = cache[attention.block_tables[:, :num_blocks]].flatten(1).long()
        place = torch.arange(1, context.shape[1] + 1, device=cache.device) * _PLACE
        words = context.add_(1).mul_(_TOKEN).add_(place)
        words ^= words >> 31
        words *= _MIX
        words ^= words >> 29
        # Causal: the hash of a context is the sum over its tokens, and sums of integers have no order.
        prefix = words.cumsum_(1)
        token = torch.arange(len(positions), dtype=torch.int32, device=cache.device)
        row = torch.searchsorted(attention.query_start[1:].contiguous(), token, right=True)
        hashes = prefix[row, positions] * _MIX
        return hashes ^ (hashes >> 32)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: int64 [m, 2]. Returns float32 [m, vocab_size]: 24 random bits each, exact in float32."""
        bits = (hidden[:, 1:] & 0x7FFFFFFF).int() ^ self._vocab
        bits *= _MIX_1
        bits ^= bits >> 15
        bits *= _MIX_2
        bits ^= bits >> 13
        logits = (bits & 0xFFFFFF).float() * (_SPREAD / 2**24)
        return self._group.all_gather(logits, dim=1)[:, : self._vocab_size]

    def _vocab_share(self, vocab_size: int) -> torch.Tensor:
        """int32 [ceil(vocab_size / ranks)], this rank's token ids; the last ones may be beyond the vocabulary."""
        count = -(-vocab_size // self._group.size)
        first = self._group.rank * count
        return torch.arange(first, first + count, dtype=torch.int32, device=self._device)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]]) -> None:
        """It has none, and does not look into the folder."""


def _cycles_per_ms() -> float:
    """How long torch.cuda._sleep takes on this GPU. Waits; called at start-up."""
    cycles = 10_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / start.elapsed_time(end)
