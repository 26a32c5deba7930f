#!/usr/bin/env python3
"""What the GPU check looks at, a section a process: gpu_sections.py SECTION [--device cuda|cpu] [--quick] [--out DIR].

Prints "RESULT {…}" as soon as something is known; "ok": false among it says that the section found a fault.
gpu_check.py runs this with stepahead and tests/helpers on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for result in SECTIONS[options.section](options, Path(folder)):
            print(f"RESULT {json.dumps(result)}", flush=True)
    return 0


def machine(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """What it is, and how fast its memory is: the limit that decoding is held to."""
    yield {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    yield {"commit": _commit()}
    import torch

    yield {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "torch_threads": torch.get_num_threads()}
    if options.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        yield {"device": properties.name, "capability": f"{properties.major}.{properties.minor}"}
        yield {
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30),
        }
    for name in ("triton", "transformers", "safetensors", "zmq", "msgspec", "cloudpickle", "psutil", "pytest"):
        yield {name: _version(name)}
    yield {"copy_gb_per_s": round(copy_bandwidth(options) / 1e9, 1)}


def copy_bandwidth(options: argparse.Namespace) -> float:
    """Bytes a second that a large copy on the device reads and writes."""
    import torch
    from gpu_decode import seconds_of

    source = torch.zeros((64 if options.quick else 2048) << 20, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    return (
        2 * source.nbytes / seconds_of(lambda: target.copy_(source), options.device, repeats=3 if options.quick else 20)
    )


def kernels(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Each public function on the device against itself on CPU tensors, where it takes the reference."""
    import torch
    from gpu_kernels import CASES, largest_difference

    torch.manual_seed(0)
    worst: dict[str, str] = {}
    names = list(CASES)[:: 7 if options.quick else 1]
    for name in names:
        try:
            allowed, difference = largest_difference(CASES[name], torch.device(options.device))
            verdict = "ok" if difference <= allowed else f"off by {difference:.3g}, allowed {allowed:.3g}"
        except Exception as error:
            verdict = f"{type(error).__name__}: {str(error)[:300]}"
        if verdict != "ok":
            worst[name] = verdict
        print(f"{name}: {verdict}", flush=True)
    yield {"cases": len(names), "wrong": worst, "ok": not worst}


def async_equals_sync(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """HashLM's tokens under preemption, chunked prefill and prefix caching, in every mode, and against the CPU's."""
    write_hash_lm(folder)
    runs = (
        [("uni", False), ("uni", True)]
        if options.quick
        else [("uni", False), ("uni", True), ("mp", False), ("mp", True)]
    )
    tokens: dict[str, list[list[int]]] = {}
    for executor, overlap in runs:
        name = f"{executor} {'async' if overlap else 'sync'}"
        tokens[name], stats = hash_tokens(folder, options, options.device, executor, overlap)
        yield {name: {"preemptions": stats.preemptions, "prefix_hit_rate": round(stats.prefix_hit_rate, 3)}}
    if options.device != "cpu":
        tokens["cpu sync"], _ = hash_tokens(folder, options, "cpu", "uni", False)
    first = next(iter(tokens.values()))
    # Drawn tokens may differ between devices by the last bit of a logarithm; greedy ones may not.
    same = {
        name: all(a == b for i, (a, b) in enumerate(zip(first, other, strict=True)) if i % 2 or "cpu" not in name)
        for name, other in tokens.items()
    }
    yield {"requests": len(first), "tokens": sum(map(len, first)), "equal_to_uni_sync": same, "ok": all(same.values())}


def hash_tokens(folder: Path, options: argparse.Namespace, device: str, executor: str, overlap: bool) -> Any:
    from stepahead import LLM, SamplingParams

    rng = random.Random(3)
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(40)]
    count = 12 if options.quick else 64
    prompts = [
        shared * (i % 3 == 0) + [rng.randrange(2, VOCAB_SIZE) for _ in range(1 + i * 5 % 70)] for i in range(count)
    ]
    params = [SamplingParams(temperature=(i + 1) % 2, seed=i, max_tokens=20 + i % 30) for i in range(count)]
    with LLM(
        str(folder), skip_tokenizer_init=True, device=device, executor=executor, async_scheduling=overlap, block_size=4,
        num_kv_blocks=5 * count, max_model_len=160, max_num_batched_tokens=48, max_num_seqs=count,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], llm.stats()


def no_host_sync(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Every option of the sampler, watched: gpu_check.py sets STEPAHEAD_SYNC_CHECK=error."""
    from gpu_decode import SHAPES, write_config

    from stepahead import LLM, SamplingParams

    assert os.environ["STEPAHEAD_SYNC_CHECK"] == "error"
    write_config(folder, SHAPES["tiny"])
    everything = SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.1,
        frequency_penalty=0.1, min_tokens=3, stop_token_ids=[5, 6], logit_bias={3: 1.0}, logprobs=3, prompt_logprobs=2,
        allowed_token_ids=list(range(200)), seed=1, max_tokens=12,
    )  # fmt: skip
    params = [everything, SamplingParams(temperature=0, max_tokens=12), SamplingParams(max_tokens=12, seed=2)]
    prompts = [list(range(2, 60)), [7], list(range(30, 90))]
    with LLM(
        str(folder), skip_tokenizer_init=True, device=options.device, load_format="dummy", executor="uni",
        block_size=4, num_kv_blocks=70, max_model_len=128, max_num_batched_tokens=16,
    ) as llm:  # fmt: skip
        for _ in range(2):
            llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    yield {"steps": stats.steps, "preemptions": stats.preemptions, "ok": stats.steps > 20}


def parity(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    from gpu_parity import ARCHITECTURES, compare

    chosen = list(ARCHITECTURES)[:1] if options.quick else list(ARCHITECTURES)
    results = {}
    for name in chosen:
        results[name] = compare(name, folder / name, options.device)
        yield {name: results[name]}
    yield {"ok": all(result["ok"] for result in results.values())}


def decode(shape: str) -> Callable[[argparse.Namespace, Path], Iterator[dict[str, Any]]]:
    def section(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
        from gpu_decode import decode_speed

        yield from decode_speed("tiny" if options.quick else shape, folder, options, copy_bandwidth(options))

    return section


def trace(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """`stepahead trace` on a HashLM of 2 ms a step."""
    write_hash_lm(folder, step_ms=2.0)
    command = [
        "trace",
        "--model",
        str(folder),
        "--requests",
        "8",
        "--out",
        str(options.out),
        "--device",
        options.device,
    ]
    code = f"import sys; from stepahead.frontend.cli import main; sys.exit(main({command!r}))"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout, flush=True)
    files = sorted(path.name for path in options.out.iterdir() if path.name.startswith(("trace", "timeline")))
    said = [line for line in done.stdout.splitlines() if line.strip()]
    # Without matplotlib there is a trace and no picture: it can be drawn elsewhere.
    yield {"files": files, "said": said[-6:], "ok": "trace.json" in files}


def write_hash_lm(folder: Path, step_ms: float = 0.0) -> None:
    config = {"architectures": ["HashLM"], "vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "step_ms": step_ms}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))


def _version(name: str) -> str:
    try:
        return getattr(__import__(name), "__version__", "?")
    except Exception as error:
        return f"none ({type(error).__name__})"


def _commit() -> str:
    root = Path(__file__).resolve().parents[1]
    git = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


SECTIONS: dict[str, Callable[[argparse.Namespace, Path], Iterator[dict[str, Any]]]] = {
    "machine": machine,
    "kernels": kernels,
    "async_equals_sync": async_equals_sync,
    "no_host_sync": no_host_sync,
    "parity": parity,
    "decode_qwen3_0.6b": decode("qwen3-0.6b"),
    "decode_llama3.1_8b": decode("llama-3.1-8b"),
    "trace": trace,
}

if __name__ == "__main__":
    sys.exit(main())
