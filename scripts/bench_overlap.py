#!/usr/bin/env python3
"""How much of the time the device works: the real engine, its processes and sockets, with a device of known speed.

    scripts/bench_overlap.py --step-ms 5 --requests 64 256 --json

The model is HashLM: its forward reads the whole context back through the KV blocks and then sleeps until `--step-ms`
have passed, so the device's speed is simulated and everything around it is real. For each number of requests an
engine with synchronous and one with async scheduling run the same work in turn, `--rounds` times; the round
of median speed is reported for each.

The device's work is what lies between its own time stamps around the forward and around sampling; the 60 to
100 µs by which a sleep ends late are part of it. With `--tp 2` two ranks do that work side by side and then gather
their logits; rank 0 is looked at, and its wait for the other one in a step is part of the work too. Only steps in
which every request decodes one token are looked at: no prefill, no ramp, no tail, and not the first tenth of what
remains.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stepahead import LLM, SamplingParams
from stepahead.frontend.device_use import DeviceUse, device_steps, device_use, steady_decode

VOCAB_SIZE = 320
PROMPT_LEN = 8
WARM_UP_STEPS = 20


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    # The device's own arithmetic is a toy: on one thread it is quickest, and leaves the other cores to the engine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-overlap-") as folder:
        _write_model(Path(folder), arguments.step_ms, PROMPT_LEN + max(arguments.steps, WARM_UP_STEPS))
        for num_requests in arguments.requests:
            for mode, use in measure(folder, num_requests, arguments).items():
                results.append(_result(mode, num_requests, arguments, use))
                print(_line(results[-1]), file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({"machine": _machine(), "results": results}))
    return 0


def measure(folder: str, num_requests: int, arguments: argparse.Namespace) -> dict[str, DeviceUse]:
    """By mode, the round of median speed."""
    uses: dict[str, list[DeviceUse]] = {"sync": [], "async": []}
    with ExitStack() as stack:
        engines = {mode: stack.enter_context(_start(folder, mode, num_requests, arguments)) for mode in uses}
        for llm in engines.values():
            _run(llm, num_requests, WARM_UP_STEPS)
        for _ in range(arguments.rounds):
            for mode, llm in engines.items():
                uses[mode].append(_run(llm, num_requests, arguments.steps))
    return {mode: sorted(rounds, key=lambda use: use.steps_per_s)[len(rounds) // 2] for mode, rounds in uses.items()}


def _start(folder: str, mode: str, num_requests: int, arguments: argparse.Namespace) -> LLM:
    return LLM(
        folder, skip_tokenizer_init=True, executor="mp", device=arguments.device,
        async_scheduling=mode == "async", tensor_parallel_size=arguments.tp,
        max_num_seqs=num_requests, max_num_batched_tokens=max(2048, PROMPT_LEN * num_requests),
    )  # fmt: skip


def _run(llm: LLM, num_requests: int, steps: int) -> DeviceUse:
    prompts = [[2 + (7 * i + j) % (VOCAB_SIZE - 2) for j in range(PROMPT_LEN)] for i in range(num_requests)]
    llm.start_profile()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True), use_tqdm=False)
    steady = steady_decode(device_steps(llm.stop_profile(None)), num_requests)
    if len(steady) < 2:
        sys.exit(f"bench_overlap: no steady decode of {num_requests} requests within {steps} steps: raise --steps")
    return device_use(steady)


def _result(mode: str, num_requests: int, arguments: argparse.Namespace, use: DeviceUse) -> dict[str, Any]:
    return {
        "mode": mode,
        "requests": num_requests,
        "step_ms": arguments.step_ms,
        "tp": arguments.tp,
        "busy": round(use.busy, 4),
        "steps_per_s": round(use.steps_per_s, 2),
        "gap_us_mean": round(use.gap_us_mean, 1),
        "gap_us_p99": round(use.gap_us_p99, 1),
        "device_step_ms": round(use.step_ms, 3),
        "steps": use.steps,
    }


def _line(result: dict[str, Any]) -> str:
    return (
        f"{result['requests']:5} requests  {result['mode']:5}  busy {result['busy']:.2%}  "
        f"{result['steps_per_s']:7.1f} steps/s  "
        f"gap mean {result['gap_us_mean']:.0f} µs, p99 {result['gap_us_p99']:.0f} µs  "
        f"(a step works {result['device_step_ms']:.2f} ms)"
    )


def _write_model(folder: Path, step_ms: float, max_len: int) -> None:
    config = {
        "architectures": ["HashLM"],
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_len,
        "step_ms": step_ms,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _machine() -> dict[str, Any]:
    import torch

    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "torch_threads": int(os.environ["OMP_NUM_THREADS"]),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=5.0, help="time of a forward pass; default: 5")
    parser.add_argument("--requests", type=int, nargs="+", default=[64], help="running at once; default: 64")
    parser.add_argument("--steps", type=int, default=200, help="tokens of each request; default: 200")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; default: 1")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON document last")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
