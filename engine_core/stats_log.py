"""Tells the log every ten seconds of work how the engine does. The step loop drives it; it has no thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from .histogram import Histogram
from .stats import EngineStats

logger = logging.getLogger(__name__)

INTERVAL_NS = 10_000_000_000
"""Of time with work at hand, between two lines."""

_SAMPLE_NS = 1_000_000_000
"""How often the number of tokens is noted, for the recent rate."""


class StatsLog:
    """Counts the engine's busy time and the recent rate into its statistics, and writes the line.

    stats: gives the statistics with their state up to date; called once for each line. clock: nanoseconds.
    """

    def __init__(self, stats: Callable[[], EngineStats], clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._stats = stats
        self._clock = clock
        self._live = stats()
        self._before = self._live.copy()
        self._samples: deque[tuple[int, int]] = deque(maxlen=INTERVAL_NS // _SAMPLE_NS + 1)
        self._last_turn: int | None = None
        self._next_sample = 0

    def turn(self) -> None:
        """The engine has work: called at each turn of its loop, and now and then while that waits for a step."""
        now, stats = self._clock(), self._live
        if self._last_turn is not None:
            stats.busy_ns += now - self._last_turn
        self._last_turn = now
        if stats.busy_ns >= self._next_sample:
            self._sample(stats)
            if stats.busy_ns - self._before.busy_ns >= INTERVAL_NS:
                self._write()

    def idle(self) -> None:
        """The engine has no work: time does not count until the next turn."""
        if self._last_turn is not None:
            self.turn()
            self._last_turn = None

    def _sample(self, stats: EngineStats) -> None:
        self._next_sample = stats.busy_ns + _SAMPLE_NS
        self._samples.append((stats.busy_ns, stats.generated_tokens))

    def refresh_rate(self) -> None:
        """Brings recent_tokens_per_s up to date."""
        stats = self._live
        busy_ns, tokens = self._samples[0] if self._samples else (0, 0)
        elapsed = stats.busy_ns - busy_ns
        stats.recent_tokens_per_s = (stats.generated_tokens - tokens) * 1e9 / elapsed if elapsed else 0.0

    def _write(self) -> None:
        now = self._stats()
        interval = now.since(self._before)
        self._before = now.copy()
        stalled = not interval.generated_tokens and interval.running
        logger.log(logging.WARNING if stalled else logging.INFO, stats_line(interval))


def stats_line(interval: EngineStats) -> str:
    """interval: what was counted in it, and the state at its end."""
    s = interval
    seconds = s.busy_ns / 1e9
    parts = [f"{s.running} running, {s.waiting} waiting", f"{s.tokens_per_s:.1f} tokens/s"]
    if not s.generated_tokens and s.running:
        parts[1] = f"NO TOKEN in the last {seconds:.0f} s ({s.steps} steps of {s.scheduled_tokens} tokens were started)"
    parts += [
        f"KV {s.kv_use:.0%} used",
        f"prefix hits {s.prefix_hit_rate:.0%}",
        f"device busy {s.device_busy:.0%}",
        f"step {_spread(s.step_time)}",
        f"gap {_spread(s.device_gap)}",
    ]
    for count, what in (
        (s.preemptions, "preemptions"),
        (s.wasted_rows, "wasted rows"),
        (s.aborted_rows, "aborted rows"),
        (s.deferred_samplings, "deferred samplings"),
    ):
        if count:
            parts.append(f"{count} {what}")
    parts.append(f"async scheduling {'on' if s.async_scheduling else 'off'} ({s.async_reason})")
    return "; ".join(parts)


def _spread(times: Histogram) -> str:
    if not times.count:
        return "-"
    return f"p50 {_readable(times.percentile_us(50))} p99 {_readable(times.percentile_us(99))}"


def _readable(us: float) -> str:
    return f"{us / 1000:.1f} ms" if us >= 1000 else f"{us:.0f} µs"
