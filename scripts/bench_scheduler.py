#!/usr/bin/env python3
"""What planning costs: µs a step for schedule and update in steady decode, and while requests come and go.

The real scheduler without a worker: prefix caching on, blocks of 16 tokens, prompts of 64, greedy, no stop tokens, two
steps in flight. "schedule" includes encoding the StepPlan for the workers, "update" encoding the outputs for the
front end. In the churn columns 5 % of the requests finish in each step and are replaced by new ones, whose arrival is
counted in "schedule". Also the front end's cost per token: detokenizing, looking for stop strings, output objects.
With --peer-python, vLLM's scheduler does the same steady decode in turn, without encoding anything; a ratio is its time
over ours. Prints one JSON document last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

from stepahead.engine_core.messages import EngineMessage, EngineRequest
from stepahead.engine_core.scheduler import ScheduledStep, Scheduler, SchedulerLimits
from stepahead.engine_core.stats import EngineStats
from stepahead.worker.codec import Codec
from stepahead.worker.messages import ExecuteModel, SamplingOptions, StepOutput, WorkerRpc

PROMPT_LEN, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 64, 2048, 16, 200_000
WARM_UP, LIFETIME = 40, 20
"""Steps before measuring; steps a request lives when 5 % finish in each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--peer-python", help="an interpreter that has vLLM")
    parser.add_argument("--peer-model", help="for it, a folder in Hugging Face's layout; only its config is read")
    parser.add_argument("--json", action="store_true", help="print only the JSON document")
    args = parser.parse_args()
    if args.peer_python and not args.peer_model:
        parser.error("--peer-python needs --peer-model")
    results = []
    for running in args.running:
        steady = measure(running, args.steps, churn=False)
        churn = measure(running, args.steps, churn=True)
        row = {"running": running, "schedule_us": steady[0], "update_us": steady[1]}
        row |= {"churn_schedule_us": churn[0], "churn_update_us": churn[1]}
        if args.peer_python:
            row |= beside_peer(running, sum(steady), args.peer_python, args.peer_model)
        results.append(row)
        if not args.json:
            print(row)
    frontend = {"running": 256, "us_per_token": frontend_us_per_token(256, args.steps)}
    print(json.dumps({"machine": machine(), "results": results, "frontend": frontend}))


def machine() -> dict[str, object]:
    """torch_threads: torch's own number; nothing here computes with it."""
    import torch

    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
    }


def beside_peer(running: int, ours_us: float, python: str, model: str) -> dict[str, float]:
    script = Path(__file__).with_name("bench_scheduler_peer.py")
    command = [python, str(script), model, str(running)]
    (peer,) = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    schedule, update = peer["schedule_us"], peer["update_us"]
    return {"peer_schedule_us": schedule, "peer_update_us": update, "ratio": round((schedule + update) / ours_us, 1)}


def measure(running: int, steps: int, churn: bool) -> tuple[float, float]:
    """(schedule, update): mean µs a step."""
    scheduler = Scheduler(
        SchedulerLimits(
            max_seqs=max(running, 1),
            max_batched_tokens=running * PROMPT_LEN,
            max_model_len=MAX_MODEL_LEN,
            max_model_len_from="the setting",
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
        ),
        EngineStats(),
    )
    plans: Codec = Codec(WorkerRpc)
    outputs: Codec = Codec(EngineMessage)
    requests = _requests(churn)
    missing = running
    in_flight: deque[ScheduledStep] = deque()
    schedule = update = 0.0
    for nth in range(-WARM_UP, steps):
        begin = time.perf_counter()
        for _ in range(missing):
            scheduler.add(next(requests))
        step = scheduler.schedule()
        if step is not None:
            plans.encode(ExecuteModel(step.plan))
        scheduled = time.perf_counter()
        if step is not None:
            in_flight.append(step)
        if len(in_flight) == 2 or step is None:
            oldest = in_flight.popleft()
            rows = len(oldest.plan.slots)
            tokens = (np.arange(rows, dtype=np.int32)[:, None] * 31 + nth) % 40_000
            output = StepOutput(oldest.plan.step_id, tokens, oldest.plan.samples.astype(np.int32))
            began_update = time.perf_counter()
            batch = scheduler.update(oldest, output)
            if batch is not None:
                outputs.encode(batch)
            update += (time.perf_counter() - began_update) if nth >= 0 else 0.0
        missing = running - scheduler.num_unfinished
        schedule += (scheduled - begin) if nth >= 0 else 0.0
    return round(schedule / steps * 1e6, 1), round(update / steps * 1e6, 1)


def _requests(churn: bool) -> Iterator[EngineRequest]:
    """With churn the first requests end one after another, so that later every step sees its share."""
    for number in count():
        prompt = (np.arange(PROMPT_LEN, dtype=np.int32) + number * 7) % 40_000
        length = (number % LIFETIME + 1 if number < 2 * LIFETIME else LIFETIME) if churn else MAX_MODEL_LEN
        yield EngineRequest(request_id=number, prompt=prompt, options=SamplingOptions(seed=number), max_tokens=length)


def frontend_us_per_token(running: int, steps: int) -> float:
    """OutputProcessor with a byte-level tokenizer, one stop string a request, outputs taken once a step."""
    from stepahead.engine_core.messages import OutputBatch
    from stepahead.frontend.detokenizer import DetokenizerFactory
    from stepahead.frontend.output_processor import OutputProcessor
    from stepahead.frontend.request_processing import PreparedRequest
    from stepahead.frontend.sampling_params import SamplingParams

    tokenizer = _byte_level_tokenizer()
    processor = OutputProcessor(DetokenizerFactory(tokenizer))
    prompt = tokenizer.encode("the sea is wide and blue")
    params = SamplingParams(max_tokens=MAX_MODEL_LEN, stop=["\n\nUser:"])
    options = SamplingOptions(seed=0)
    for number in range(running):
        request = EngineRequest(
            request_id=number, prompt=np.array(prompt, np.int32), options=options, max_tokens=MAX_MODEL_LEN
        )
        processor.add(str(number), PreparedRequest("", prompt, params, [request]))
    ids, counts = np.arange(running), np.ones(running, np.int32)
    text = tokenizer.encode("and the waves came in from the west, one by one. " * 8)
    took = 0.0
    for nth in range(-WARM_UP, steps):
        batch = OutputBatch(ids, counts, np.full(running, text[nth % len(text)], np.int32))
        begin = time.perf_counter()
        for state in processor.process(batch)[0]:
            state.take_output()
        took += (time.perf_counter() - begin) if nth >= 0 else 0.0
    return round(took / steps / running * 1e6, 2)


def _byte_level_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(["and the waves came in from the west, one by one, wide and blue"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


if __name__ == "__main__":
    main()
