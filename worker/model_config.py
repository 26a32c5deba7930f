"""What config.json says about a model, in our own words. Importing this loads no torch.

Both spellings are read: transformers 4's (rope_theta, rope_scaling, torch_dtype) and transformers 5's
(rope_parameters, dtype). What we cannot compute faithfully is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ..errors import ConfigError
from .models.registry import SUPPORTED

T = TypeVar("T")

DTYPES = ("float32", "bfloat16", "float16")


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
    attention_bias: of the q, k and v projections; output_bias: of the o projection.
    sliding_window: tokens a query sees back, itself included; 0 for all.
    windowed_layers: the layers that sliding_window applies to, None for every layer.
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
    windowed_layers: list[int] | None = None
    step_ms: float = 0.0

    def window_of(self, layer: int) -> int:
        """The sliding window of one layer; 0 for all tokens."""
        if self.windowed_layers is None or layer in self.windowed_layers:
            return self.sliding_window
        return 0


def check_division(model: ModelConfig, tensor_size: int, num_stages: int) -> None:
    """Raises: ConfigError, with the sizes that would do, when the ranks cannot divide the model."""
    if model.architecture == "HashLM":  # has neither heads nor layers to divide
        return
    if num_stages > model.num_layers:
        raise ConfigError(
            f"{model.num_layers} layers cannot be divided among pipeline_parallel_size={num_stages} stages"
        )
    problem = _division_problem(model, tensor_size)
    if problem:
        sizes = [size for size in range(1, model.num_heads + 1) if not _division_problem(model, size)]
        raise ConfigError(
            f"{problem} tensor_parallel_size={tensor_size} ranks; this model can use "
            f"{', '.join(map(str, sizes[:-1]))}{' or ' if len(sizes) > 1 else ''}{sizes[-1]}"
        )


def _division_problem(model: ModelConfig, size: int) -> str:
    """Empty when `size` ranks can share each layer."""
    if model.num_heads % size:
        return f"{model.num_heads} attention heads cannot be divided among"
    if max(model.num_kv_heads, size) % min(model.num_kv_heads, size):
        return f"{model.num_kv_heads} KV heads cannot be divided among"
    if model.intermediate_size % size:
        return f"{model.intermediate_size} rows of the MLP cannot be divided among"
    return ""


class _RopeFields(msgspec.Struct):
    """`rope_parameters`, or the older `rope_scaling` (whose kind may be called "type")."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    full_attention: dict[str, Any] | None = None
    sliding_attention: dict[str, Any] | None = None


class _ConfigFile(msgspec.Struct):
    """The fields of config.json that we read, by HF's names and with HF's defaults."""

    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    step_ms: float = 0.0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: _RopeFields | None = None
    rope_parameters: _RopeFields | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | UnsetType | None = UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None


class _GenerationFile(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def read_model_config(folder: str | Path) -> ModelConfig:
    """Reads config.json (and generation_config.json) of a model folder in Hugging Face's layout.

    Raises: ConfigError, one line naming the folder or file and what is wrong with it.
    """
    folder = Path(folder)
    if not folder.exists():
        raise ConfigError(f"model folder '{folder}' does not exist")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"'{folder}' is not a model folder: it has no config.json")
    raw = _read_json(path)
    architecture = _architecture(path, raw)
    fields = _convert(path, raw, _ConfigFile)
    eos_token_ids = _eos_token_ids(folder, fields)
    if fields.vocab_size < 1 or fields.max_position_embeddings < 1:
        raise ConfigError(f"{path}: vocab_size and max_position_embeddings must be at least 1")
    if architecture == "HashLM":
        return ModelConfig(
            architecture=architecture,
            vocab_size=fields.vocab_size,
            max_position=fields.max_position_embeddings,
            eos_token_ids=eos_token_ids,
            step_ms=fields.step_ms,
        )
    return _transformer_config(path, architecture, fields, eos_token_ids)


def _transformer_config(path: Path, architecture: str, fields: _ConfigFile, eos_token_ids: list[int]) -> ModelConfig:
    _check_sizes(path, fields)
    _refuse_unsupported(path, fields)
    is_qwen2, is_qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    has_bias = fields.attention_bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    default_head_dim = 128 if is_qwen3 else fields.hidden_size // fields.num_attention_heads
    num_kv_heads = fields.num_key_value_heads or fields.num_attention_heads
    if fields.num_attention_heads % num_kv_heads:
        raise ConfigError(
            f"{path}: {fields.num_attention_heads} attention heads are not a multiple of {num_kv_heads} KV heads"
        )
    window, windowed_layers = _sliding_window(path, architecture, fields)
    rope = fields.rope_scaling or fields.rope_parameters or _RopeFields()
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.vocab_size,
        max_position=fields.max_position_embeddings,
        eos_token_ids=eos_token_ids,
        dtype=_dtype(path, fields),
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=fields.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.head_dim or default_head_dim,
        rms_norm_eps=fields.rms_norm_eps,
        rope_theta=rope.rope_theta or fields.rope_theta or 10000.0,
        rope_scaling=_rope_scaling(path, rope, fields),
        attention_bias=has_bias or is_qwen2,
        output_bias=has_bias,
        mlp_bias=fields.mlp_bias and architecture == "LlamaForCausalLM",
        qk_norm=is_qwen3,
        tie_word_embeddings=fields.tie_word_embeddings,
        sliding_window=window,
        windowed_layers=windowed_layers,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"cannot read {path}: it holds no JSON object")
    return raw


def _convert(path: Path, raw: dict[str, Any], target: type[T]) -> T:
    try:
        return msgspec.convert(raw, target)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None


def _architecture(path: Path, raw: dict[str, Any]) -> str:
    named = raw.get("architectures")
    known = ", ".join(SUPPORTED)
    if not isinstance(named, list) or not named:
        raise ConfigError(f"{path} names no architecture; supported: {known}")
    for architecture in named:
        if architecture in SUPPORTED:
            return architecture
    raise ConfigError(f"{path}: architecture {named[0]!r} is not supported; supported: {known}")


def _eos_token_ids(folder: Path, fields: _ConfigFile) -> list[int]:
    path = folder / "generation_config.json"
    ids = None
    if path.is_file():
        ids = _convert(path, _read_json(path), _GenerationFile).eos_token_id
    if ids is None:
        ids = fields.eos_token_id
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def _check_sizes(path: Path, fields: _ConfigFile) -> None:
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        value = getattr(fields, name)
        if value < 1:
            raise ConfigError(f"{path}: {name} is {value}, or missing; it must be at least 1")
    for name in ("num_key_value_heads", "head_dim"):
        value = getattr(fields, name)
        if value is not None and value < 1:
            raise ConfigError(f"{path}: {name} is {value}; it must be at least 1")


def _refuse_unsupported(path: Path, fields: _ConfigFile) -> None:
    if fields.quantization_config is not None:
        method = fields.quantization_config.get("quant_method", "unknown")
        raise ConfigError(f"{path}: quantized checkpoints are not supported (quantization {method!r})")
    if fields.hidden_act != "silu":
        raise ConfigError(f"{path}: hidden_act {fields.hidden_act!r} is not supported, only 'silu'")


def _dtype(path: Path, fields: _ConfigFile) -> str:
    dtype = (fields.dtype or fields.torch_dtype or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"{path}: checkpoint dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return dtype


def _rope_scaling(path: Path, rope: _RopeFields, fields: _ConfigFile) -> RopeScaling | None:
    partial = rope.partial_rotary_factor or fields.partial_rotary_factor or 1.0
    if partial != 1.0:
        raise ConfigError(f"{path}: partial_rotary_factor {partial} is not supported, only 1")
    if rope.full_attention is not None or rope.sliding_attention is not None:
        raise ConfigError(f"{path}: rope_parameters that differ by layer type are not supported")
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ConfigError(f"{path}: rope scaling {kind!r} is not supported; supported: default, linear, llama3")
    if rope.factor is None or rope.factor <= 0:
        raise ConfigError(f"{path}: rope scaling {kind!r} needs a factor above 0, not {rope.factor}")
    original = fields.original_max_position_embeddings or rope.original_max_position_embeddings
    return RopeScaling(
        kind=kind,
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_max_position=original or fields.max_position_embeddings,
    )


def _sliding_window(path: Path, architecture: str, fields: _ConfigFile) -> tuple[int, list[int] | None]:
    """The window and the layers it applies to, as ModelConfig has them."""
    if architecture == "MistralForCausalLM":
        # HF's MistralConfig takes 4096 when the key is absent, and no window when it is null.
        window = 4096 if fields.sliding_window is UNSET else fields.sliding_window or 0
        return _checked_window(path, window), None
    if architecture == "LlamaForCausalLM" or not fields.use_sliding_window:
        return 0, None
    window = _checked_window(path, 4096 if fields.sliding_window is UNSET else fields.sliding_window or 0)
    layers = range(fields.num_hidden_layers)
    if fields.layer_types is None:
        return window, [layer for layer in layers if layer >= fields.max_window_layers]
    if len(fields.layer_types) != len(layers):
        raise ConfigError(f"{path}: {len(fields.layer_types)} layer_types for {len(layers)} layers")
    for kind in fields.layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"{path}: layer type {kind!r} is not supported")
    return window, [layer for layer in layers if fields.layer_types[layer] == "sliding_attention"]


def _checked_window(path: Path, window: Any) -> int:
    if window < 0:
        raise ConfigError(f"{path}: sliding_window {window} must not be negative")
    return int(window)
