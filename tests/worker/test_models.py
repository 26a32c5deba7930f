"""Every architecture computes the logits that transformers computes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paged_run import PagedRun
from stepahead.config import parse_settings, resolve
from stepahead.worker.loader import load_model
from stepahead.worker.model_config import ModelConfig, RopeScaling, read_model_config
from stepahead.worker.models.base import Model
from stepahead.worker.models.transformer import rope_table
from stepahead.worker.parallel import ParallelGroup
from tiny_models import VOCAB_SIZE, make_tiny_model

PROMPT_LENGTH = 23
CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 6}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama-all-kv-heads": ("LlamaForCausalLM", {"num_key_value_heads": 4, "num_hidden_layers": 3}),
    "llama-head-dim": ("LlamaForCausalLM", {"head_dim": 16}),
    "llama3-rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "linear-rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-mixed-windows": ("Qwen2ForCausalLM", {**QWEN_WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 24}),
    "qwen3-tied-bias": ("Qwen3ForCausalLM", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-layer-types": (
        "Qwen3ForCausalLM",
        {**QWEN_WINDOW, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@dataclass
class Pair:
    ours: Model
    reference: Any

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab]"""
        with torch.no_grad():
            return self.reference(torch.tensor([tokens])).logits[0]


def load(folder: Path, **settings: Any) -> Model:
    model_config = read_model_config(folder)
    config = resolve(parse_settings(str(folder), settings), model_config, executor_supports_async=True)
    return load_model(config, CPU, ParallelGroup())


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    import transformers

    architecture, overrides = CASES[request.param]
    folder = make_tiny_model(architecture, tmp_path_factory.mktemp(request.param), **overrides)
    reference = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
    return Pair(load(folder), reference.eval())


def assert_same_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_prompt_computed_whole_gives_the_logits_of_transformers(pair: Pair) -> None:
    prompt = tokens(PROMPT_LENGTH)
    (logits,) = PagedRun(pair.ours).step([prompt])
    assert_same_logits(logits, pair.expected(prompt))


def test_prompt_in_chunks_over_scattered_blocks_gives_the_logits_of_transformers(pair: Pair) -> None:
    prompt = tokens(PROMPT_LENGTH, seed=1)
    run = PagedRun(pair.ours, seed=1)
    chunks = [run.step([prompt[start:stop]])[0] for start, stop in ((0, 3), (3, 11), (11, 12), (12, 23))]
    assert_same_logits(torch.cat(chunks), pair.expected(prompt))


def test_decode_steps_give_the_logits_of_transformers(pair: Pair) -> None:
    sequence = tokens(PROMPT_LENGTH, seed=2)
    run = PagedRun(pair.ours, seed=2)
    logits = [run.step([sequence[:14]])[0]]
    logits += [run.step([[token]])[0] for token in sequence[14:]]
    assert_same_logits(torch.cat(logits), pair.expected(sequence))


def test_rows_of_different_length_in_one_step_do_not_touch_each_other(pair: Pair) -> None:
    long, short = tokens(PROMPT_LENGTH, seed=3), tokens(9, seed=4)
    run = PagedRun(pair.ours, num_rows=2, seed=3)
    steps = [run.step([long[:17], short[:4]]), run.step([long[17:18], short[4:8]]), run.step([long[18:], short[8:]])]
    assert_same_logits(torch.cat([logits[0] for logits in steps]), pair.expected(long))
    assert_same_logits(torch.cat([logits[1] for logits in steps]), pair.expected(short))


def test_sliding_window_shorter_than_the_prompt_changes_the_logits(tmp_path: Path) -> None:
    """Without this, a window that both sides ignore would pass the comparisons above."""
    prompt = tokens(PROMPT_LENGTH)
    outputs = []
    for window in (5, None):
        folder = make_tiny_model("MistralForCausalLM", tmp_path / str(window), sliding_window=window)
        outputs.append(PagedRun(load(folder)).step([prompt])[0])
    torch.testing.assert_close(outputs[0][:5], outputs[1][:5])
    assert (outputs[0][5:] - outputs[1][5:]).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reduced_precision_stays_near_float32(tmp_path: Path, dtype: str) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path)
    prompt = tokens(PROMPT_LENGTH)
    (expected,) = PagedRun(load(folder)).step([prompt])
    model = load(folder, dtype=dtype)
    (logits,) = PagedRun(model).step([prompt])
    assert logits.dtype == getattr(torch, dtype)
    assert 0 < (logits - expected).abs().max() < 0.1 * expected.abs().max()
    keys, _ = model.allocate_kv_cache(1, 4)[0]
    assert keys.dtype == getattr(torch, dtype)


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path, tie_word_embeddings=True)
    model: Any = load(folder)
    assert model.lm_head.packed is model.embed_tokens.weight
    assert not model.embed_tokens.weight.requires_grad


def test_kv_bytes_per_block_is_what_the_cache_takes(tmp_path: Path) -> None:
    model = load(make_tiny_model("Qwen3ForCausalLM", tmp_path, head_dim=24), dtype="bfloat16")
    cache = model.allocate_kv_cache(num_blocks=5, block_size=16)
    assert [tensor.shape for layer in cache for tensor in layer] == [(5, 16, 2, 24)] * 4
    assert sum(tensor.nbytes for layer in cache for tensor in layer) == 5 * model.kv_bytes_per_block(16)
    assert all(tensor.eq(0).all() for layer in cache for tensor in layer)


def test_kv_cache_takes_no_memory_until_it_is_used(tmp_path: Path) -> None:
    model = load(make_tiny_model("LlamaForCausalLM", tmp_path))
    before = resident_bytes()
    cache = model.allocate_kv_cache(num_blocks=(1 << 30) // model.kv_bytes_per_block(16), block_size=16)
    assert len(cache) == 2
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_rope_table_is_no_longer_than_the_longest_request(tmp_path: Path) -> None:
    model: Any = load(make_tiny_model("LlamaForCausalLM", tmp_path), max_model_len=40)
    assert model.cos_sin.shape == (40, 8)


def test_llama3_rope_has_the_frequencies_of_transformers_at_full_size() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192}
    reference = LlamaConfig(hidden_size=4096, num_attention_heads=32, rope_parameters=parameters)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, CPU)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=1,
        max_position=100,
        head_dim=128,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(kind="llama3", factor=8.0),
    )
    angles = torch.outer(torch.arange(100.0), frequencies)
    torch.testing.assert_close(rope_table(config, CPU), torch.cat((angles.cos(), angles.sin()), -1), atol=1e-5, rtol=0)
