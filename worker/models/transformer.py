"""The decoder-only transformer behind Llama, Mistral, Qwen2 and Qwen3.

They differ only in what ModelConfig says: biases, q/k norms, head size, rope scaling, sliding windows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import numpy as np
import torch

from ...kernels.kv_write import kv_write
from ...kernels.paged_attention import paged_attention
from ...kernels.rope import apply_rope
from ..attention import AttentionMetadata
from ..layers import (
    GatedParallelLinear,
    ParallelLMHead,
    Placement,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ..model_config import ModelConfig
from ..parallel import ONLY_STAGE, ParallelGroup, PipelineStage
from ..weights import WeightSlot, WeightSource, fill_slots
from .base import KVCache

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Attention:
    """Grouped-query self-attention over the paged KV cache."""

    def __init__(self, config: ModelConfig, layer: int, place: Placement) -> None:
        self.qkv = QKVParallelLinear(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.attention_bias, place
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, config.output_bias, place
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, place) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, place) if config.qk_norm else None
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.sliding_window = config.window_of(layer)

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionMetadata,
    ) -> torch.Tensor:
        """x: [t, hidden]. kv: this layer's cache, into which the tokens' k and v are written."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = torch.split_with_sizes(heads, (self.qkv.num_heads, self.qkv.num_kv_heads, self.qkv.num_kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        apply_rope(q, k, positions, cos_sin)
        k_cache, v_cache = kv
        kv_write(k, v, k_cache, v_cache, attention.slot_mapping)
        attended = paged_attention(
            q,
            k_cache,
            v_cache,
            attention.block_tables,
            attention.query_start,
            attention.seq_lens,
            self.scale,
            attention.max_query_len,
            attention.max_seq_len,
            self.sliding_window,
        )
        return self.o_proj(attended.flatten(-2))

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = {**self.qkv.slots(prefix), **self.o_proj.slots(f"{prefix}o_proj.")}
        if self.q_norm is not None and self.k_norm is not None:
            slots |= {**self.q_norm.slots(f"{prefix}q_norm."), **self.k_norm.slots(f"{prefix}k_norm.")}
        return slots


class MLP:
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = GatedParallelLinear(hidden, inner, bias, place)
        self.down_proj = RowParallelLinear(inner, hidden, bias, place)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up(x))

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {**self.gate_up.slots(prefix), **self.down_proj.slots(f"{prefix}down_proj.")}


class Layer:
    def __init__(self, config: ModelConfig, layer: int, place: Placement) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.attention = Attention(config, layer, place)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.mlp = MLP(config, place)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {
            **self.input_norm.slots(f"{prefix}input_layernorm."),
            **self.attention.slots(f"{prefix}self_attn."),
            **self.post_attention_norm.slots(f"{prefix}post_attention_layernorm."),
            **self.mlp.slots(f"{prefix}mlp."),
        }


class Transformer:
    """See base.Model. Parameters are plain tensors, uninitialised until load_weights.

    embed_tokens: on the first stage, and with tied embeddings on the last. norm, lm_head: on the last stage.
    layers: this stage's, by their place in the whole model.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        group: ParallelGroup,
        stage: PipelineStage = ONLY_STAGE,
    ) -> None:
        """Raises: ConfigError when the model cannot be divided among the group's ranks."""
        place = Placement(dtype, device, group)
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        self.config = config
        self.place = place
        self.stage = stage
        self.hidden = hidden_size, dtype
        self.embed_tokens: VocabParallelEmbedding | None = None
        self.norm: RMSNorm | None = None
        self.lm_head: ParallelLMHead | None = None
        if stage.first or (stage.last and config.tie_word_embeddings):
            self.embed_tokens = VocabParallelEmbedding(vocab_size, hidden_size, place)
        self.layers = {layer: Layer(config, layer, place) for layer in stage.layers(config.num_layers)}
        if stage.last:
            tied = self.embed_tokens if config.tie_word_embeddings else None
            self.norm = RMSNorm(hidden_size, config.rms_norm_eps, place)
            self.lm_head = ParallelLMHead(vocab_size, hidden_size, place, tied.weight if tied else None)
        self.cos_sin = rope_table(config, device)

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, attention: AttentionMetadata
    ) -> torch.Tensor:
        """Between stages goes the residual; the last stage returns it normed."""
        layers = list(self.layers.values())
        residual = self.embed_tokens(inputs) if self.stage.first and self.embed_tokens is not None else inputs
        normed = layers[0].input_norm(residual)
        # Each addition to the residual is fused with the norm that reads it next.
        norms_after = [*(layer.input_norm for layer in layers[1:]), self.norm]
        for layer, kv, norm_after in zip(layers, kv_cache, norms_after, strict=True):
            attended = layer.attention(normed, positions, self.cos_sin, kv, attention)
            normed, residual = layer.post_attention_norm.add(attended, residual)
            after_mlp = layer.mlp(normed)
            if norm_after is None:
                return after_mlp + residual
            normed, residual = norm_after.add(after_mlp, residual)
        return normed

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.lm_head is not None, "only the last stage has logits"
        return self.lm_head(hidden)

    def kv_bytes_per_block(self, block_size: int) -> int:
        per_token = self._num_kv_heads * self.config.head_dim * self.place.dtype.itemsize
        return 2 * len(self.layers) * block_size * per_token

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        shape = (num_blocks, block_size, self._num_kv_heads, self.config.head_dim)
        return [(self._zeros(shape), self._zeros(shape)) for _ in self.layers]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: slot.shape for name, slot in self._slots().items()}

    def load_weights(self, weights: Iterable[tuple[str, WeightSource]]) -> None:
        fill_slots(self._slots(), (item for item in weights if not self._redundant(item[0])))
        for layer in self.layers.values():
            for part in (layer.attention.qkv, layer.attention.o_proj, layer.mlp.gate_up, layer.mlp.down_proj):
                part.pack()
        if self.lm_head is not None:
            self.lm_head.pack()
        if not self.stage.first:
            self.embed_tokens = None  # it was there to fill the LM head

    @property
    def _num_kv_heads(self) -> int:
        return next(iter(self.layers.values())).attention.qkv.num_kv_heads

    def _redundant(self, name: str) -> bool:
        """Old checkpoints hold rope's frequencies; some with tied embeddings hold the matrix twice. What other
        stages hold is theirs to check."""
        if name.endswith("rotary_emb.inv_freq") or (self.config.tie_word_embeddings and name == "lm_head.weight"):
            return True
        of_layer = _LAYER.match(name)
        if of_layer is not None:
            layer = int(of_layer[1])
            return layer < self.config.num_layers and layer not in self.layers
        elsewhere = (("model.embed_tokens.", self.embed_tokens), ("model.norm.", self.norm), ("lm_head.", self.lm_head))
        return any(name.startswith(prefix) and held is None for prefix, held in elsewhere)

    def _slots(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        if self.embed_tokens is not None:
            slots |= self.embed_tokens.slots("model.embed_tokens.")
        for index, layer in self.layers.items():
            slots |= layer.slots(f"model.layers.{index}.")
        if self.norm is not None and self.lm_head is not None:
            slots |= self.norm.slots("model.norm.")
            if not self.config.tie_word_embeddings:
                slots |= self.lm_head.slots("lm_head.")
        return slots

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        dtype, device = self.place.dtype, self.place.device
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # numpy's zeros are calloc's: memory is taken block by block as it is used, where torch's touch it all.
        return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def rope_table(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """float32 [max_position, head_dim]: for each position the cosines, then the sines, of its angles."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = _scaled(1.0 / config.rope_theta**exponents, config)
    angles = torch.outer(torch.arange(config.max_position, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _scaled(frequencies: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Radians per position, [head_dim / 2], stretched to a longer context.

    "llama3" as published with Llama 3.1: wavelengths short against the original context stay, long ones are
    divided by the factor, and between the two the divisor is interpolated.
    """
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * stretched + kept * frequencies
