"""`stepahead trace`: the same work with and without overlap, recorded and drawn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .device_use import device_steps, device_use, steady_decode
from .hub import resolve_folder
from .llm import LLM
from .profile import Profile, write_trace
from .request_processing import Prompt
from .sampling_params import SamplingParams
from .timeline import draw_timeline
from .timeline_window import windows_of
from .tokenizer import check_tokenizer_files

_PROMPTS = ("The sea is", "Once upon a time", "The capital of France", "In the beginning")
_PROMPT_IDS = [2, 3, 5, 7]
"""For a model without a tokenizer."""

_WARM_UP_TOKENS = 4
_ALIKE = 1.25
"""Both runs have the same work for the device: its steps differ by no more than this factor on a machine at rest."""


def run_trace(model: str, settings: dict[str, Any], num_requests: int, max_tokens: int, out: Path) -> None:
    """Writes trace.json, timeline.png and timeline.svg into `out`. trace.json is written first: it is there
    also when nothing can be drawn. Raises: ConfigError, EngineDeadError."""
    if num_requests < 1 or max_tokens < 1:
        raise ConfigError(f"--requests {num_requests} --max-tokens {max_tokens}: must be at least 1")
    if not _has_tokenizer(model, settings):
        settings = {**settings, "skip_tokenizer_init": True}
        print(f"{model} has no tokenizer: its front end makes no text", file=sys.stderr)
    settings.setdefault("max_num_seqs", max(num_requests, 8))
    profiles: list[Profile] = []
    step_ms: list[float] = []
    for async_scheduling in (False, True):
        profile, device = record(model, {**settings, "async_scheduling": async_scheduling}, num_requests, max_tokens)
        steps = steady_decode(device_steps(profile), num_requests)
        if len(steps) > 1:
            use = device_use(steps)
            step_ms.append(use.step_ms)
            print(f"{profile.mode}: {use.steps_per_s:.1f} steps/s, device idle {1 - use.busy:.1%}", file=sys.stderr)
        profiles.append(profile)
    if step_ms and max(step_ms) > _ALIKE * min(step_ms):
        print(
            f"the same steps took {' and '.join(f'{ms:.1f}' for ms in step_ms)} ms on the device: something else kept "
            "this machine busy, so do not compare the two runs' speed",
            file=sys.stderr,
        )
    print(f"{write_trace(out, profiles)}  (opens in ui.perfetto.dev)", flush=True)
    work = f"{num_requests} request{'s' * (num_requests > 1)} decoding"
    title = f"{Path(model).name}, {work} on {device}, scheduled in two ways"
    for path in draw_timeline(windows_of(profiles, num_requests), title, out):
        print(path)


def record(model: str, settings: dict[str, Any], num_requests: int, max_tokens: int) -> tuple[Profile, str]:
    """Returns: the recorded run, and the device's name."""
    with LLM(model, **settings) as llm:
        has_tokenizer = not settings.get("skip_tokenizer_init")
        prompts: list[Prompt] = [
            _PROMPTS[i % len(_PROMPTS)] if has_tokenizer else [*_PROMPT_IDS, i] for i in range(num_requests)
        ]
        for tokens in (min(_WARM_UP_TOKENS, max_tokens), max_tokens):
            llm.start_profile()
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
            profile = llm.stop_profile(None)
        return profile, llm.engine_info.device


def _has_tokenizer(model: str, settings: dict[str, Any]) -> bool:
    if settings.get("skip_tokenizer_init"):
        return False
    if settings.get("tokenizer"):
        return True
    folder = resolve_folder(model, settings.get("revision"))
    try:
        check_tokenizer_files(folder)
    except ConfigError:
        return False
    return True
