"""What the engine counts."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, kw_only=True):
    """Totals since the start, and the state now.

    wasted_rows: rows that a started step still ran for a request that had stopped; nobody saw them.
    aborted_rows: likewise for requests the client aborted. rows_beyond_limit: rows scheduled past a
    request's max_tokens; always 0.
    prefix_tokens, prefix_hit_tokens: prompt tokens looked up at admission, and found.
    device_busy_ns, device_span_ns: time the device ran steps, out of the time it had any to run.
    """

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    wasted_rows: int = 0
    aborted_rows: int = 0
    rows_beyond_limit: int = 0
    deferred_samplings: int = 0
    prefix_tokens: int = 0
    prefix_hit_tokens: int = 0
    device_busy_ns: int = 0
    device_span_ns: int = 0
    async_scheduling: bool = False
    async_reason: str = ""

    @property
    def device_busy(self) -> float:
        """Share of the time with work at hand in which the device ran it, 0 to 1."""
        return self.device_busy_ns / self.device_span_ns if self.device_span_ns else 0.0


class DeviceClock:
    """Adds up the device's busy time from the steps' own time stamps."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._last_end: int | None = None

    def step_done(self, start_ns: int, end_ns: int, idle_ns: int) -> None:
        """idle_ns: of the time between start and end."""
        since = start_ns if self._last_end is None else self._last_end
        self._stats.device_busy_ns += end_ns - start_ns - idle_ns
        self._stats.device_span_ns += max(end_ns - since, end_ns - start_ns)
        self._last_end = end_ns

    def idle(self) -> None:
        """The engine has run out of work: the time until the next step does not count."""
        self._last_end = None
