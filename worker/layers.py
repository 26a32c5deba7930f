"""Tensor-parallel layers: each holds one rank's part of a weight and knows which part that is.

Linear weights are [out_features, in_features]. `slots(prefix)` names the checkpoint tensors that fill a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import ConfigError
from ..kernels.linear import Weight, gated_linear, linear, pack_weight
from ..kernels.rms_norm import add_rms_norm, rms_norm
from .parallel import ParallelGroup
from .weights import WeightSlot

_ALL = slice(None)


@dataclass(frozen=True)
class Placement:
    """Where parameters live: their dtype, their device, and the ranks they are divided among."""

    dtype: torch.dtype
    device: torch.device
    group: ParallelGroup

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class OutputPart:
    """One checkpoint matrix inside a merged weight: its rows start .. start + size of `total` are this rank's."""

    name: str
    total: int
    start: int
    size: int


class _Linear:
    """weight: [out, in], to be filled; packed: what is multiplied by."""

    _gated = False

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.packed: Weight = weight

    def pack(self) -> None:
        """Once, after loading: the weight can no longer be filled."""
        self.packed = pack_weight(self.weight, self._gated)
        del self.weight


class ColumnParallelLinear(_Linear):
    """Output features are divided among the ranks; one or more checkpoint matrices are stacked into one weight."""

    def __init__(self, in_features: int, parts: Sequence[OutputPart], bias: bool, place: Placement) -> None:
        self.parts = parts
        self.sizes = [part.size for part in parts]
        self.in_features = in_features
        super().__init__(place.empty(sum(self.sizes), in_features))
        self.bias = place.empty(sum(self.sizes)) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [t, in_features]. Returns [t, sum(self.sizes)]."""
        return linear(x, self.packed, self.bias)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """prefix: of the module that holds the parts, e.g. "model.layers.0.mlp."."""
        slots = {}
        row = 0
        for part in self.parts:
            mine, kept = slice(row, row + part.size), slice(part.start, part.start + part.size)
            shape = (part.total, self.in_features)
            slots[f"{prefix}{part.name}.weight"] = WeightSlot(self.weight[mine], shape, (kept, _ALL))
            if self.bias is not None:
                slots[f"{prefix}{part.name}.bias"] = WeightSlot(self.bias[mine], (part.total,), (kept,))
            row += part.size
        return slots


class GatedParallelLinear(ColumnParallelLinear):
    """Two matrices of one input, the gate's and that of what it lets through, each divided evenly."""

    _gated = True

    def __init__(self, in_features: int, out_features: int, bias: bool, place: Placement) -> None:
        """out_features: rows of each."""
        size = place.group.share(out_features, "rows of gate_proj")
        names = ("gate_proj", "up_proj")
        parts = [OutputPart(name, out_features, place.group.rank * size, size) for name in names]
        super().__init__(in_features, parts, bias, place)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [t, in_features]. Returns silu(gate(x)) * up(x), [t, size]."""
        return gated_linear(x, self.packed, self.bias)


class QKVParallelLinear(ColumnParallelLinear):
    """q, k and v, divided by heads. With more ranks than KV heads, each KV head is held by several ranks.

    num_heads, num_kv_heads: this rank's.
    """

    def __init__(
        self, hidden_size: int, total_heads: int, total_kv_heads: int, head_dim: int, bias: bool, place: Placement
    ) -> None:
        """Raises: ConfigError when the heads cannot be divided among the ranks."""
        group = place.group
        self.num_heads = group.share(total_heads, "attention heads")
        self.num_kv_heads = local_kv_heads(total_kv_heads, group)

        def part(name: str, total: int, first: int, held: int) -> OutputPart:
            return OutputPart(name, total * head_dim, first * head_dim, held * head_dim)

        first_kv = group.rank * total_kv_heads // group.size
        parts = [
            part("q_proj", total_heads, group.rank * self.num_heads, self.num_heads),
            part("k_proj", total_kv_heads, first_kv, self.num_kv_heads),
            part("v_proj", total_kv_heads, first_kv, self.num_kv_heads),
        ]
        super().__init__(hidden_size, parts, bias, place)


def local_kv_heads(total_kv_heads: int, group: ParallelGroup) -> int:
    """How many KV heads a rank holds. Raises: ConfigError when they neither divide nor replicate evenly."""
    if total_kv_heads >= group.size:
        return group.share(total_kv_heads, "KV heads")
    if group.size % total_kv_heads:
        raise ConfigError(
            f"{total_kv_heads} KV heads cannot be replicated evenly over tensor_parallel_size={group.size} ranks"
        )
    return 1


class RowParallelLinear(_Linear):
    """Input features are divided among the ranks; the results are summed."""

    def __init__(self, in_features: int, out_features: int, bias: bool, place: Placement) -> None:
        self.group = place.group
        self.in_features = in_features
        super().__init__(place.empty(out_features, self.group.share(in_features, "input features")))
        self.bias = place.empty(out_features) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: this rank's [t, in_features / size]. Returns [t, out_features], the same on every rank."""
        # The sum over ranks must hold the bias once.
        bias = self.bias if self.group.rank == 0 else None
        return self.group.all_reduce(linear(x, self.packed, bias))

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """prefix: of this layer, e.g. "model.layers.0.mlp.down_proj."."""
        out_features, size = self.weight.shape
        start = self.group.rank * size
        part = (_ALL, slice(start, start + size))
        slots = {f"{prefix}weight": WeightSlot(self.weight, (out_features, self.in_features), part)}
        if self.bias is not None:
            slots[f"{prefix}bias"] = WeightSlot.whole(self.bias)
        return slots


class VocabShard:
    """A [vocab, hidden] weight divided by tokens: rank r holds rows r * per_rank .. , the last ones maybe fewer."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement, shared: torch.Tensor | None = None) -> None:
        """shared: the weight of another VocabShard, to be this one's too (tied embeddings)."""
        self.group = place.group
        self.vocab_size = vocab_size
        self.per_rank = -(-vocab_size // self.group.size)
        self.start = min(self.group.rank * self.per_rank, vocab_size)
        self.weight = place.empty(self.per_rank, hidden_size) if shared is None else shared

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """prefix: of this layer, e.g. "lm_head."."""
        held = min(self.per_rank, self.vocab_size - self.start)
        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{prefix}weight": WeightSlot(self.weight[:held], shape, (slice(self.start, self.start + held), _ALL))}


class VocabParallelEmbedding(VocabShard):
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int32 [t], each below vocab_size. Returns [t, hidden], the same on every rank."""
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.start
        held = (local >= 0) & (local < self.per_rank)
        rows = F.embedding(torch.where(held, local, 0), self.weight)
        return self.group.all_reduce(torch.where(held.unsqueeze(-1), rows, 0))


class ParallelLMHead(VocabShard):
    def __init__(self, vocab_size: int, hidden_size: int, place: Placement, shared: torch.Tensor | None = None) -> None:
        super().__init__(vocab_size, hidden_size, place, shared)
        self.packed: Weight = self.weight

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [m, hidden]. Returns [m, vocab_size], the same on every rank."""
        return self.group.all_gather(linear(hidden, self.packed), dim=-1)[:, : self.vocab_size]

    def pack(self) -> None:
        """After loading. Where it packs, tied embeddings become two copies: the embedding's rows must stay readable."""
        self.packed = pack_weight(self.weight)
        del self.weight


class RMSNorm:
    """Held whole by every rank."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        self.weight = place.empty(size)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [.., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm of x + residual, x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {f"{prefix}weight": WeightSlot.whole(self.weight)}
