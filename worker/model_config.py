"""What config.json says about a model, in our own words. Importing this loads no torch."""

from __future__ import annotations

import msgspec


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """kind "linear" or "llama3" (Llama 3.1's wavelength-dependent scaling)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """architecture: HF's class name, e.g. "LlamaForCausalLM", or "HashLM".
    max_position: the longest context the model was made for, in tokens.
    sliding_window: tokens a query sees back, itself included; 0 for all.
    dtype: of the checkpoint. step_ms: HashLM only, how long its forward takes.
    """

    architecture: str
    vocab_size: int
    max_position: int
    eos_token_ids: list[int] = []
    dtype: str = "float32"
    hidden_size: int = 0
    intermediate_size: int = 0
    num_layers: int = 1
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int = 0
    step_ms: float = 0.0
