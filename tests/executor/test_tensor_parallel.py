"""Ranks that share a model give the tokens of one, whatever the scheduling."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psutil
import pytest

from oracle import token_ids
from stepahead import LLM, ConfigError, SamplingParams
from tiny_models import VOCAB_SIZE, make_tiny_model

WIDE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 8}
ARCHITECTURES = {
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "MistralForCausalLM": {"sliding_window": 24},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
}


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in (1, 7, 16, 33, 50)]


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=10, ignore_eos=True) for i in range(5)]
    settings = {"device": "cpu", "skip_tokenizer_init": True, "max_num_batched_tokens": 32, **settings}
    with LLM(str(folder), **settings) as llm:
        return [token_ids(output) for output in llm.generate(prompts(), params, use_tqdm=False)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_three_ranks_give_the_tokens_of_one(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(architecture, tmp_path, **{**WIDE, **ARCHITECTURES[architecture]})
    alone = tokens(folder, executor="uni")
    assert tokens(folder, tensor_parallel_size=3) == alone


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_two_ranks_with_one_kv_head_between_them(async_scheduling: bool, tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path, num_key_value_heads=1)
    alone = tokens(folder, executor="uni")
    assert tokens(folder, tensor_parallel_size=2, async_scheduling=async_scheduling) == alone


def test_hash_lm_runs_on_two_ranks(tmp_path: Path) -> None:
    folder = make_tiny_model("HashLM", tmp_path)
    assert tokens(folder, tensor_parallel_size=2) == tokens(folder, executor="uni")


def test_heads_that_do_not_divide_are_refused_by_number(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path, **WIDE)
    with pytest.raises(ConfigError, match=r"3 KV heads cannot be divided among tensor_parallel_size=2") as caught:
        LLM(str(folder), device="cpu", skip_tokenizer_init=True, tensor_parallel_size=2)
    assert "\n" not in str(caught.value)
    assert psutil.Process().children(recursive=True) == []


def test_uni_is_one_rank(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="executor 'uni' runs one rank, not 2"):
        LLM(str(folder), executor="uni", tensor_parallel_size=2)
