"""How a `stepahead generate` run went: the scheduling mode, and how fast it was."""

from __future__ import annotations

import time
from typing import Any

from ..engine_core.messages import EngineInfo
from ..engine_core.stats import EngineStats
from .outputs import RequestMetrics


class GenerationReport:
    """Times are seconds. TTFT is from a prompt's arrival to its first token, the mean over the prompts."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._start = self._end = 0.0
        self._ttfts: list[float] = []
        self._prompt_tokens = self._output_tokens = 0
        self._device_busy = 0.0

    def start(self) -> None:
        self._start = time.monotonic()

    def add(self, num_prompt: int, num_output: int, metrics: RequestMetrics) -> None:
        """A finished prompt."""
        self._prompt_tokens += num_prompt
        self._output_tokens += num_output
        if metrics.first_token_time is not None:
            self._ttfts.append(metrics.first_token_time - metrics.arrival_time)

    def finish(self, stats: EngineStats) -> None:
        self._end = time.monotonic()
        self._device_busy = stats.device_busy

    @property
    def _ttft(self) -> float:
        return sum(self._ttfts) / len(self._ttfts) if self._ttfts else 0.0

    @property
    def _tokens_per_s(self) -> float:
        return self._output_tokens / max(self._end - self._start, 1e-9)

    def mode_line(self) -> str:
        state = "on" if self._info.async_scheduling else "off"
        return f"async scheduling: {state} ({self._info.async_reason})"

    def end_line(self) -> str:
        return (
            f"TTFT {self._ttft:.3f} s, {self._tokens_per_s:.1f} tokens/s, "
            f"{self._info.device} busy {self._device_busy:.0%} of the time"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "async_scheduling": self._info.async_scheduling,
            "async_reason": self._info.async_reason,
            "device": self._info.device,
            "timings": {
                "ttft_s": round(self._ttft, 6),
                "total_s": round(self._end - self._start, 6),
                "tokens_per_s": round(self._tokens_per_s, 3),
                "prompt_tokens": self._prompt_tokens,
                "output_tokens": self._output_tokens,
                "device_busy": round(self._device_busy, 4),
            },
        }
