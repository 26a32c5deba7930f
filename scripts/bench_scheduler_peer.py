#!/usr/bin/env python3
"""The same steady decode through vLLM's scheduler; `bench_scheduler.py --peer-python` runs this with its interpreter.

    bench_scheduler_peer.py MODEL N [N ...]      written for vLLM 0.32; prints one JSON document, a row for each N

No worker and no encoding: only what schedule() and update_from_output() take of N running requests, one step after
the other, prefix caching on, blocks of 16 tokens, prompts of 64.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PROMPT_LEN, BLOCK_SIZE, NUM_BLOCKS, WARM_UP, STEPS = 64, 16, 200_000, 12, 200
ANY_TOKEN = 5


def main() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    model, *counts = sys.argv[1:]
    print(json.dumps([measure(model, int(running)) for running in counts]))


def measure(model: str, running: int) -> dict[str, float]:
    """Mean µs a step."""
    scheduler = make_scheduler(model)
    for number in range(running):
        scheduler.add_request(make_request(number))
    schedule = update = 0.0
    for nth in range(-WARM_UP, STEPS):
        began = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        output = sample(scheduler, plan)
        sampled = time.perf_counter()
        scheduler.update_from_output(plan, output)
        if nth >= 0:
            schedule += scheduled - began
            update += time.perf_counter() - sampled
    if plan.total_num_scheduled_tokens != running:
        raise RuntimeError(f"{plan.total_num_scheduled_tokens} of {running} requests were decoding at the end")
    microseconds = 1e6 / STEPS
    return {
        "running": running,
        "schedule_us": round(schedule * microseconds, 1),
        "update_us": round(update * microseconds, 1),
    }


def make_scheduler(model: str) -> Any:
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    arguments = EngineArgs(model=model, max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=2048)
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    attention = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["layer"], attention)]
    return AsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


def make_request(number: int) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        request_id=str(number),
        prompt_token_ids=[(number * 7 + place) % 40_000 for place in range(PROMPT_LEN)],
        sampling_params=SamplingParams(max_tokens=1000, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def sample(scheduler: Any, plan: Any) -> Any:
    """What a worker would answer: a token of each request whose prompt is through."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(plan.num_scheduled_tokens)
    tokens: list[list[int]] = [[] if scheduler.requests[name].is_prefill_chunk else [ANY_TOKEN] for name in ids]
    places = {name: place for place, name in enumerate(ids)}
    return ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=tokens)


if __name__ == "__main__":
    main()
