"""config.json is read as transformers reads it, and refused when we could not compute it faithfully."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepahead.errors import ConfigError
from stepahead.worker.model_config import ModelConfig, RopeScaling, read_model_config
from tiny_models import make_tiny_model

MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3_RULES = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**MINIMAL, **fields}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(folder)


def refusal(folder: Path, **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, **fields)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_old_and_new_spelling_mean_the_same(tmp_path: Path) -> None:
    old = read(
        tmp_path,
        torch_dtype="bfloat16",
        rope_theta=500000.0,
        rope_scaling={"rope_type": "llama3", **LLAMA3_RULES},
    )
    new = read(
        tmp_path,
        dtype="bfloat16",
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_RULES},
    )
    assert old == new
    assert old.dtype == "bfloat16"
    assert old.rope_theta == 500000.0
    assert old.rope_scaling == RopeScaling(kind="llama3", factor=32.0, original_max_position=8192)


def test_oldest_rope_spelling_is_read(tmp_path: Path) -> None:
    scaling = read(tmp_path, rope_scaling={"type": "linear", "factor": 2}).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("linear", 2.0)


def test_fields_that_old_files_lack_get_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.num_kv_heads == 4
    assert config.head_dim == 8
    assert config.rope_theta == 10000.0
    assert config.rope_scaling is None
    assert config.dtype == "float32"
    assert not config.tie_word_embeddings
    assert read(tmp_path, architectures=["Qwen3ForCausalLM"]).head_dim == 128


@pytest.mark.parametrize(
    ("architecture", "qkv_bias", "output_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", False, False, False),
        ("MistralForCausalLM", False, False, False),
        ("Qwen2ForCausalLM", True, False, False),
        ("Qwen3ForCausalLM", False, False, True),
    ],
)
def test_architectures_differ_in_biases_and_norms(
    tmp_path: Path, architecture: str, qkv_bias: bool, output_bias: bool, qk_norm: bool
) -> None:
    config = read(tmp_path, architectures=[architecture])
    assert (config.attention_bias, config.output_bias, config.qk_norm) == (qkv_bias, output_bias, qk_norm)


def test_eos_ids_come_from_generation_config_first(tmp_path: Path) -> None:
    assert read(tmp_path).eos_token_ids == []
    assert read(tmp_path, eos_token_id=2).eos_token_ids == [2]
    assert read(tmp_path, eos_token_id=[2, 3]).eos_token_ids == [2, 3]
    assert read(tmp_path, generation={"eos_token_id": None}, eos_token_id=2).eos_token_ids == [2]
    assert read(tmp_path, generation={"eos_token_id": [7, 8]}, eos_token_id=2).eos_token_ids == [7, 8]


def windows(config: ModelConfig) -> list[int]:
    return [config.window_of(layer) for layer in range(config.num_layers)]


def test_mistral_window_is_4096_when_absent_and_off_when_null(tmp_path: Path) -> None:
    mistral = ["MistralForCausalLM"]
    assert windows(read(tmp_path, architectures=mistral)) == [4096, 4096]
    assert windows(read(tmp_path, architectures=mistral, sliding_window=None)) == [0, 0]
    assert windows(read(tmp_path, architectures=mistral, sliding_window=10)) == [10, 10]


def test_qwen_window_applies_only_when_used_and_only_to_its_layers(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 10, "max_window_layers": 1}
    assert windows(read(tmp_path, **fields)) == [0, 0]
    fields["use_sliding_window"] = True
    assert windows(read(tmp_path, **fields)) == [0, 10]
    assert windows(read(tmp_path, **fields, layer_types=["sliding_attention", "full_attention"])) == [10, 0]


def test_what_save_pretrained_writes_is_read_back(tmp_path: Path) -> None:
    config = read_model_config(make_tiny_model("Qwen3ForCausalLM", tmp_path, head_dim=24, dtype="bfloat16"))
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 4, 2, 24)
    assert (config.dtype, config.eos_token_ids, config.max_position) == ("bfloat16", [1], 256)


def test_hash_lm_needs_four_fields(tmp_path: Path) -> None:
    config = read_model_config(make_tiny_model("HashLM", tmp_path, step_ms=1.5))
    assert config == ModelConfig(
        architecture="HashLM", vocab_size=320, max_position=256, eos_token_ids=[1], step_ms=1.5
    )


def test_missing_folder_and_missing_config_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'/no/such/folder' does not exist"):
        read_model_config("/no/such/folder")
    with pytest.raises(ConfigError, match=r"is not a model folder: it has no config.json"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", "", "\x80"])
def test_config_that_is_no_json_object_is_refused_by_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"cannot read .*config.json"):
        read_model_config(tmp_path)


def test_unsupported_architecture_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    message = refusal(tmp_path, architectures=["GPT2LMHeadModel"])
    assert "GPT2LMHeadModel" in message
    for name in ("HashLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in message
    assert "names no architecture" in refusal(tmp_path, architectures=None)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3"),
        ({"vocab_size": 0}, "vocab_size"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            "1 layer_types for 2 layers",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window -1"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    message = refusal(tmp_path, **fields)
    assert named in message
    assert "config.json" in message


def test_reading_a_config_loads_no_torch(tmp_path: Path) -> None:
    read(tmp_path)
    code = (
        "import sys; from stepahead.worker.model_config import read_model_config;"
        f"read_model_config({str(tmp_path)!r}); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
