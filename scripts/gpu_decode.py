"""Decode speed of models with random weights, and how near it comes to what the memory's speed allows."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROMPT_LEN = 128

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip


def write_config(folder: Path, shape: dict[str, Any]) -> None:
    fixed = {"torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps({**fixed, **shape}))


def decode_speed(
    name: str, folder: Path, options: argparse.Namespace, copy_bandwidth: float
) -> Iterator[dict[str, Any]]:
    """ms a step of steady decode by batch, from two runs that differ only in their number of decode steps.

    copy_bandwidth: bytes a second. A step must read every weight once and the KV of every row: that, at the speed of a
    large copy, is the limit of which "bandwidth_share" is the share reached. Two bytes an element.
    """
    from stepahead import LLM, SamplingParams

    shape = SHAPES[name]
    write_config(folder, shape)
    batches, short, long = ([1, 2], 4, 12) if options.quick else ([1, 64, 256], 8, 72)
    begin = time.monotonic()
    with LLM(
        str(folder), skip_tokenizer_init=True, device=options.device, load_format="dummy", dtype="bfloat16",
        max_model_len=512, max_num_seqs=max(batches), max_num_batched_tokens=8192, enable_prefix_caching=False,
        **({"num_kv_blocks": 200} if options.quick else {}),
    ) as llm:  # fmt: skip
        yield {"model": name, "start_s": round(time.monotonic() - begin, 1), "weights_gb": weight_bytes(shape) / 1e9}
        for batch in batches:
            rng = random.Random(batch)
            prompts = [[rng.randrange(3, shape["vocab_size"]) for _ in range(PROMPT_LEN)] for _ in range(batch)]

            def run(tokens: int, prompts: list[list[int]] = prompts) -> float:
                began = time.monotonic()
                params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
                llm.generate(prompts, params, use_tqdm=False)
                return time.monotonic() - began

            first = run(short)  # compiles what this batch needs
            prefill = min(run(short) for _ in range(2))
            before = llm.stats()
            whole = min(run(long) for _ in range(2))
            step_s = (whole - prefill) / (long - short)
            read = weight_bytes(shape) + batch * (PROMPT_LEN + (short + long) / 2) * kv_bytes_per_token(shape)
            yield {
                f"batch {batch}": {
                    "ms_per_step": round(step_s * 1e3, 3),
                    "tok_s": round(batch / step_s, 1),
                    "limit_ms": round(read / copy_bandwidth * 1e3, 3),
                    "bandwidth_share": round(read / copy_bandwidth / step_s, 3),
                    "first_run_s": round(first, 2),
                    "device_busy": round(llm.stats().since(before).device_busy, 3),
                }
            }


def weight_bytes(shape: dict[str, Any]) -> int:
    """Read in a decode step: all matrices, with the output embedding once and single rows of the input embedding."""
    hidden, heads, kv_heads = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = hidden * shape["head_dim"] * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * shape["intermediate_size"]
    return 2 * (shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden)


def kv_bytes_per_token(shape: dict[str, Any]) -> int:
    return 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def seconds_of(work: Callable[[], Any], device: str, repeats: int) -> float:
    """The median of `repeats`, after one run that does not count."""
    import torch

    times = []
    for _ in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[repeats // 2]
