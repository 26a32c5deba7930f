"""Tokens per second of a real model on this machine, beside vLLM's or transformers' in the same run.

    bench_throughput.py MODEL --batch 1 8 32 --prompt-len 64 1024 --output-len 64 \\
        --peer vllm --peer-python ../peer-venv/bin/python --peer transformers --json

Every engine runs in a process of its own, and they take turns, repetition by repetition: what else the machine does
meets all of them. Prompts are the same token ids for each, outputs are greedy and of full length. Two figures a case:

  tok_s       the prompts were seen before, and the prefix caches hold them: decode
  cold_tok_s  prompts nobody has seen: prefill and decode

Runs are a moment apart, so that no engine is still busy when the next one's turn comes, and each follows a few
tokens that do not count: in a virtual machine memory that has rested is slow at first. Each figure is the best of
--repeats, output tokens over the time from the first request's submission to the last token. A
ratio is ours over the peer's; transformers has no prefix cache, so both of its ratios compare cold runs. TTFT and ITL
are ours, of cold runs, streamed. Progress goes to stderr; --json prints one JSON document last.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

OURS = "stepahead"
PEERS = ("vllm", "transformers")
MAX_NUM_SEQS = 64
SETTLE_SECONDS = 1.5
"""Between two runs: a worker of vLLM's spins for a second after its last token, which would count against the next."""
_ROUSING = {"batch": 1, "length": 16, "salt": 1 << 20}
_ROUSING_TOKENS = 8
"""Before each run: on a virtual machine 256 MB took 600 ms to read after two seconds of rest, and 45 ms after that."""
_READY = "bench-reply:"
"""Begins the lines of an engine's process that are meant for us."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder in Hugging Face's layout")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="requests at once")
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[64], help="tokens")
    parser.add_argument("--output-len", type=int, default=64, help="tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048, help="tokens, of every engine")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", action="append", choices=PEERS, default=[], help="may be given several times")
    parser.add_argument("--peer-python", default=sys.executable, help="the interpreter that has vllm")
    parser.add_argument("--settings", type=json.loads, default={}, help="more of our settings, as JSON")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", choices=(OURS, *PEERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        return serve(arguments)
    if max(arguments.prompt_len) + arguments.output_len > arguments.max_model_len:
        parser.error(f"prompt and output are longer than --max-model-len {arguments.max_model_len}")
    if max(arguments.batch) > MAX_NUM_SEQS:
        parser.error(f"--batch: at most {MAX_NUM_SEQS} requests at once")
    document = measure(arguments)
    if arguments.json:
        print(json.dumps(document))
    else:
        print_table(document)
    return 0


# ---- the measuring process ----------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    engines: dict[str, EngineProcess] = {}
    try:
        for name in (OURS, *arguments.peer):
            engines[name] = EngineProcess(name, arguments)
            say(f"{name} is ready: {engines[name].ready}")
        salts = iter(range(1, 1 << 30))
        results = [
            measure_case(engines, batch, prompt_len, arguments, salts)
            for prompt_len in arguments.prompt_len
            for batch in arguments.batch
        ]
    finally:
        for engine in engines.values():
            engine.close()
    ready = engines[OURS].ready
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "torch_threads": ready["torch_threads"],
        "python": platform.python_version(),
        "torch": ready["torch"],
        "engines": {name: engine.ready["version"] for name, engine in engines.items()},
    }
    return {
        "machine": machine,
        "model": Path(arguments.model).name,
        "dtype": arguments.dtype,
        "results": results,
        "memory": ready["memory"],
        "start_to_first_token_s": ready["start_to_first_token_s"],
    }


def measure_case(
    engines: dict[str, EngineProcess], batch: int, prompt_len: int, arguments: argparse.Namespace, salts: Any
) -> dict[str, Any]:
    """Each engine's warm and cold runs, in turn."""
    case = {"batch": batch, "prompt_len": prompt_len, "output_len": arguments.output_len}
    warm, cold = ({name: float("inf") for name in engines} for _ in range(2))
    latencies: list[dict[str, list[float]]] = []
    for engine in engines.values():
        engine.ask("run", **case, salt=0)
    for _ in range(arguments.repeats):
        salt = next(salts)
        for name, engine in engines.items():
            cold[name] = min(cold[name], engine.ask("run", **case, salt=salt)["seconds"])
        for name, engine in engines.items():
            if name != "transformers":
                warm[name] = min(warm[name], engine.ask("run", **case, salt=0)["seconds"])
        latencies.append(engines[OURS].ask("stream", **case, salt=next(salts)))
    tokens = batch * arguments.output_len
    result = {**case, "tok_s": tokens / warm[OURS], "cold_tok_s": tokens / cold[OURS]}
    for kind in ("ttft_ms", "itl_ms"):
        values = sorted(value for latency in latencies for value in latency[kind])
        result |= {f"{kind}_p{share}": percentile(values, share) for share in (50, 90, 99)}
    result["ms_per_step"] = warm[OURS] / arguments.output_len * 1e3
    peers = {}
    for name in engines:
        if name != OURS:
            theirs = cold[name] if name == "transformers" else warm[name]
            ours = cold[OURS] if name == "transformers" else warm[OURS]
            peers[name] = {
                "tok_s": tokens / theirs,
                "ratio": theirs / ours,
                "cold_tok_s": tokens / cold[name],
                "cold_ratio": cold[name] / cold[OURS],
            }
    if peers:
        first = next(iter(peers.values()))
        result |= {"peer_tok_s": first["tok_s"], "ratio": first["ratio"], "cold_ratio": first["cold_ratio"]}
        result["peers"] = peers
    result = rounded(result)
    say(json.dumps(result))
    return result


class EngineProcess:
    """One engine, in a process that answers a line of JSON with a line of JSON. ready: what it says of itself."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self._name = name
        python = arguments.peer_python if name == "vllm" else sys.executable
        command = [python, os.path.abspath(__file__), arguments.model, "--engine", name, "--dtype", arguments.dtype]
        command += ["--max-model-len", str(arguments.max_model_len), "--settings", json.dumps(arguments.settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._answer()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Raises: RuntimeError when the engine's process is gone."""
        assert self._process.stdin is not None
        time.sleep(SETTLE_SECONDS)
        self._process.stdin.write(json.dumps({"method": method, **parameters}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_READY):
                return json.loads(line[len(_READY) :])
        raise RuntimeError(f"the process of {self._name} ended with code {self._process.wait()}; see above")


def percentile(ordered: list[float], share: int) -> float:
    return ordered[min(len(ordered) * share // 100, len(ordered) - 1)]


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def print_table(document: dict[str, Any]) -> None:
    print(json.dumps({key: value for key, value in document.items() if key != "results"}, indent=2))
    for result in document["results"]:
        print("  ".join(f"{key} {value}" for key, value in result.items() if key != "peers"))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- an engine's process ------------------------------------------------------------------------


class Engine(Protocol):
    def ready(self) -> dict[str, Any]: ...

    def run(self, prompts: list[list[int]], output_len: int) -> None: ...


def serve(arguments: argparse.Namespace) -> int:
    """Until stdin ends."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    kinds: dict[str, Any] = {OURS: Stepahead, "vllm": Vllm, "transformers": Transformers}
    engine = kinds[arguments.engine](arguments)
    vocab_size = json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"]
    reply(engine.ready())
    for line in sys.stdin:
        question = json.loads(line)
        prompts = make_prompts(question["batch"], question["prompt_len"], question["salt"], vocab_size)
        engine.run(make_prompts(**_ROUSING, vocab_size=vocab_size), _ROUSING_TOKENS)
        if question["method"] == "stream":
            reply(asyncio.run(engine.stream(prompts, question["output_len"])))
            continue
        start = time.perf_counter()
        engine.run(prompts, question["output_len"])
        reply({"seconds": time.perf_counter() - start})
    engine.close()
    return 0


def reply(answer: dict[str, Any]) -> None:
    print(_READY + json.dumps(answer), flush=True)


def make_prompts(batch: int, length: int, salt: int, vocab_size: int) -> list[list[int]]:
    """Token ids, none of the first hundred, where special tokens stand. Different salts begin differently."""
    ids = min(40000, vocab_size - 100)
    return [[(i * 7 + j * 13 + salt * 1009) % ids + 100 for j in range(length)] for i in range(batch)]


class Stepahead:
    """Ours, through AsyncLLM."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        began = time.perf_counter()
        from stepahead import AsyncLLM, SamplingParams
        from stepahead.frontend.sampling_params import RequestOutputKind

        self._params, self._kinds = SamplingParams, RequestOutputKind
        settings = {"max_model_len": arguments.max_model_len, "max_num_seqs": MAX_NUM_SEQS, **arguments.settings}
        self._engine = AsyncLLM(arguments.model, dtype=arguments.dtype, **settings)
        asyncio.run(self._first_token())
        self._seconds = time.perf_counter() - began

    def ready(self) -> dict[str, Any]:
        import torch

        from stepahead import __version__

        info = self._engine.engine_info
        pids = {"front_end": os.getpid(), "engine_core": info.pid}
        pids |= {f"worker_{rank}": pid for rank, pid in enumerate(info.worker_pids) if pid != info.pid}
        memory = {f"{name}_peak_mb": peak_mb(pid) for name, pid in pids.items()}
        return {
            "version": __version__,
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "memory": {**memory, "all_peak_mb": round(sum(memory.values()), 1)},
            "start_to_first_token_s": round(self._seconds, 2),
        }

    def run(self, prompts: list[list[int]], output_len: int) -> None:
        asyncio.run(self._gather(prompts, output_len))

    async def stream(self, prompts: list[list[int]], output_len: int) -> dict[str, list[float]]:
        """ttft_ms and itl_ms of every request: when the reader had its first token, and each later one."""
        arrivals = await asyncio.gather(*(self._arrivals(prompt, output_len) for prompt in prompts))
        gaps = [(later - earlier) * 1e3 for times in arrivals for earlier, later in itertools.pairwise(times[1:])]
        return {"ttft_ms": [(times[1] - times[0]) * 1e3 for times in arrivals], "itl_ms": gaps}

    def close(self) -> None:
        self._engine.close()

    async def _gather(self, prompts: list[list[int]], output_len: int) -> None:
        await asyncio.gather(*(self._finish(prompt, output_len) for prompt in prompts))

    async def _finish(self, prompt: list[int], output_len: int) -> None:
        params = self._greedy(output_len, self._kinds.FINAL_ONLY)
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params):
            count = len(output.outputs[0].token_ids)
        if count != output_len:
            raise RuntimeError(f"{count} tokens instead of {output_len}")

    async def _arrivals(self, prompt: list[int], output_len: int) -> list[float]:
        """Submission, then each token's arrival; tokens that came together count as one arrival each."""
        times = [time.perf_counter()]
        params = self._greedy(output_len, self._kinds.DELTA)
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params):
            times += [time.perf_counter()] * len(output.outputs[0].token_ids)
        return times

    async def _first_token(self) -> None:
        async for _ in self._engine.generate("The sea is", self._greedy(1, self._kinds.FINAL_ONLY)):
            pass

    def _greedy(self, max_tokens: int, kind: Any) -> Any:
        return self._params(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind)


class Vllm:
    def __init__(self, arguments: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        limits = {"max_model_len": arguments.max_model_len, "max_num_seqs": MAX_NUM_SEQS}
        self._llm = LLM(arguments.model, dtype=arguments.dtype, **limits)

    def ready(self) -> dict[str, Any]:
        from vllm import __version__

        return {"version": __version__}

    def run(self, prompts: list[list[int]], output_len: int) -> None:
        params = self._params(temperature=0, max_tokens=output_len, ignore_eos=True)
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    def close(self) -> None:
        del self._llm


class Transformers:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        dtype = getattr(torch, arguments.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()

    def ready(self) -> dict[str, Any]:
        from transformers import __version__

        return {"version": __version__}

    def run(self, prompts: list[list[int]], output_len: int) -> None:
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            self._model.generate(
                ids, attention_mask=self._torch.ones_like(ids), do_sample=False,
                max_new_tokens=output_len, min_new_tokens=output_len,
            )  # fmt: skip

    def close(self) -> None:
        del self._model


def peak_mb(pid: int) -> float:
    """The most memory that a process has ever held, in MB, from Linux's account of it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError(f"no peak memory in /proc/{pid}/status")


if __name__ == "__main__":
    sys.exit(main())
