"""What the engine counts."""

from __future__ import annotations

import msgspec

from .histogram import Histogram

_GAUGES = (
    "running",
    "waiting",
    "free_blocks",
    "total_blocks",
    "recent_tokens_per_s",
    "async_scheduling",
    "async_reason",
)


class EngineStats(msgspec.Struct, kw_only=True):
    """Totals since the start, and the state now.

    running: requests in the batch. waiting: requests not admitted yet, or preempted.
    generated_tokens: delivered to clients. finished: requests that ended by themselves.
    wasted_rows: rows that a started step still ran for a request that had stopped; nobody saw them.
    aborted_rows: likewise for requests the client aborted. rows_beyond_limit: rows scheduled past a
    request's max_tokens; always 0. deferred_samplings: steps sampled late, because a structured row's last
    token was still in flight.
    prefix_tokens, prefix_hit_tokens: prompt tokens looked up at admission, and found.
    busy_ns: time the engine had any work. recent_tokens_per_s: over the last 10 seconds of that time.
    device_busy_ns, device_span_ns: time the device ran steps, out of the time it had any to run.
    step_time: of each step on the device. device_gap: from a step's end there to the next one's start, while the
    engine had work.
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
    busy_ns: int = 0
    recent_tokens_per_s: float = 0.0
    device_busy_ns: int = 0
    device_span_ns: int = 0
    step_time: Histogram = msgspec.field(default_factory=Histogram)
    device_gap: Histogram = msgspec.field(default_factory=Histogram)
    async_scheduling: bool = False
    async_reason: str = ""

    @property
    def kv_use(self) -> float:
        """Share of the KV pool that requests hold, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the looked-up prompt tokens that were in the cache, 0 to 1."""
        return self.prefix_hit_tokens / self.prefix_tokens if self.prefix_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, over the time the engine had work."""
        return self.generated_tokens * 1e9 / self.busy_ns if self.busy_ns else 0.0

    @property
    def device_busy(self) -> float:
        """Share of the time with work at hand in which the device ran it, 0 to 1."""
        return self.device_busy_ns / self.device_span_ns if self.device_span_ns else 0.0

    def since(self, before: EngineStats) -> EngineStats:
        """What was counted after `before`, an earlier copy of this one; the state as it is now."""
        changes = {
            name: getattr(self, name) - getattr(before, name)
            for name in self.__struct_fields__
            if name not in (*_GAUGES, "step_time", "device_gap")
        }
        return msgspec.structs.replace(
            self,
            **changes,
            step_time=self.step_time.since(before.step_time),
            device_gap=self.device_gap.since(before.device_gap),
        )

    def copy(self) -> EngineStats:
        return msgspec.structs.replace(self, step_time=self.step_time.copy(), device_gap=self.device_gap.copy())


class DeviceClock:
    """Adds up the device's busy time from the steps' own time stamps."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._last_end: int | None = None

    def step_done(self, start_ns: int, end_ns: int, idle_ns: int) -> None:
        """idle_ns: of the time between start and end."""
        stats, took = self._stats, end_ns - start_ns
        gap = 0 if self._last_end is None else max(0, start_ns - self._last_end)
        stats.device_busy_ns += took - idle_ns
        stats.device_span_ns += took + gap
        stats.step_time.add((took - idle_ns) / 1000)
        if self._last_end is not None:
            stats.device_gap.add((gap + idle_ns) / 1000)
        self._last_end = end_ns

    def idle(self) -> None:
        """The engine has run out of work: the time until the next step does not count."""
        self._last_end = None
