"""Greedy output equals transformers' generate token for token, through the public door."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from demo_model import demo_model
from oracle import Oracle, token_ids
from stepahead import LLM, SamplingParams
from tiny_models import VOCAB_SIZE, make_tiny_model

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama3": (
        "LlamaForCausalLM",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 24}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
}
SERVINGS = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 7},
    "crowded": {"num_kv_blocks": 52, "block_size": 2, "max_model_len": 104, "max_num_batched_tokens": 16},
    "sync": {"async_scheduling": False},
}
MAX_TOKENS = 12


def mixed_prompts() -> list[list[int]]:
    """Lengths 1 to 90, some with a common beginning of several blocks."""
    rng = random.Random(7)
    shared = [rng.randrange(4, VOCAB_SIZE) for _ in range(40)]
    alone = [[rng.randrange(4, VOCAB_SIZE) for _ in range(n)] for n in (1, 2, 15, 16, 17, 33, 90)]
    return alone + [shared + prompt for prompt in alone[:4]] + [shared]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    architecture, overrides = ARCHITECTURES[request.param]
    folder = make_tiny_model(architecture, tmp_path_factory.mktemp(request.param), **overrides)
    oracle = Oracle(folder)
    return folder, [oracle.greedy(prompt, MAX_TOKENS) for prompt in mixed_prompts()]


@pytest.mark.parametrize("serving", SERVINGS)
def test_greedy_tokens_equal_transformers(tiny: tuple[Path, list[list[int]]], serving: str) -> None:
    folder, expected = tiny
    settings = {"executor": "uni", "skip_tokenizer_init": True, "device": "cpu", **SERVINGS[serving]}
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(str(folder), **settings) as llm:
        first = llm.generate(mixed_prompts(), params, use_tqdm=False)
        again = llm.generate(mixed_prompts(), params, use_tqdm=False)
        stats = llm.stats()
    assert [token_ids(output) for output in first] == expected
    assert [token_ids(output) for output in again] == expected
    assert stats.prefix_hit_rate > 0
    assert serving != "crowded" or stats.preemptions > 0


def test_logprobs_equal_transformers(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path)
    oracle, prompts = Oracle(folder), mixed_prompts()
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    with LLM(str(folder), executor="mp", skip_tokenizer_init=True, device="cpu", max_num_batched_tokens=32) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = token_ids(output)
        truth = oracle.logprobs([*prompt, *tokens])
        answer = output.outputs[0]
        assert answer.cumulative_logprob == pytest.approx(
            sum(step[t].logprob for step, t in zip(answer.logprobs, tokens, strict=True))
        )
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        entries_of = [*output.prompt_logprobs[1:], *answer.logprobs]
        counts = [2] * (len(prompt) - 1) + [3] * len(tokens)
        rows = zip(entries_of, [*prompt[1:], *tokens], counts, strict=True)
        for position, (entries, chosen, count) in enumerate(rows):
            row = truth[position]
            assert chosen in entries
            assert set(row.topk(count).indices.tolist()) <= set(entries)
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(row[token].item(), abs=1e-3)
                assert entry.rank == int((row > row[token]).sum()) + 1


@pytest.mark.timeout(600)
def test_the_demo_model_equals_transformers_for_prompts_of_1_to_1500_tokens() -> None:
    folder = demo_model()
    oracle = Oracle(folder)
    lengths = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 64, 100, 128, 200, 333, 512, 777, 1000, 1500)
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(folder, dtype="float32", device="cpu", max_num_batched_tokens=512) as llm:
        text = (Path(__file__).parents[2] / "LICENSE").read_text()
        tokens = llm.get_tokenizer().encode(text)
        prompts = [tokens[7 * i : 7 * i + length] for i, length in enumerate(lengths)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert token_ids(output) == oracle.greedy(prompt, 12), f"prompt of {len(prompt)} tokens"
