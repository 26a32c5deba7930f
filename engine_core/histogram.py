"""How long things took: counts in fixed buckets, so that adding is cheap and any two can be compared."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

BUCKETS_AN_OCTAVE = 4
BOUNDS_US = tuple(2 ** (i / BUCKETS_AN_OCTAVE) for i in range(27 * BUCKETS_AN_OCTAVE))
"""Upper bounds of all buckets but the last, in µs: 1 µs to about two minutes, each 19 % above the one before."""


class Histogram(msgspec.Struct):
    """counts[i]: values above BOUNDS_US[i - 1], up to BOUNDS_US[i] µs. sum_us: of all values. max_us: an upper
    bound of the largest, exact until histograms are subtracted."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_US) + 1))
    sum_us: float = 0.0
    max_us: float = 0.0

    def add(self, us: float) -> None:
        self.counts[bisect_left(BOUNDS_US, us)] += 1
        self.sum_us += us
        if us > self.max_us:
            self.max_us = us

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_us(self) -> float:
        """0 when there is nothing."""
        count = self.count
        return self.sum_us / count if count else 0.0

    def percentile_us(self, percent: float) -> float:
        """The value that `percent` of all do not exceed, at most 10 % off; 0 when there is nothing."""
        wanted = self.count * percent / 100
        reached = 0
        for bucket, count in enumerate(self.counts):
            reached += count
            if count and reached >= wanted:
                return min(_middle_us(bucket), self.max_us)
        return 0.0

    def since(self, before: Histogram) -> Histogram:
        """What was added after `before`, an earlier copy of this one."""
        counts = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        return Histogram(counts, self.sum_us - before.sum_us, self.max_us)

    def copy(self) -> Histogram:
        return Histogram(list(self.counts), self.sum_us, self.max_us)


def _middle_us(bucket: int) -> float:
    """Half-way between the bucket's bounds, as ratios go; 0 for the first, 19 % past its bound for the last."""
    if bucket == 0:
        return 0.0
    return BOUNDS_US[bucket - 1] * 2 ** (0.5 / BUCKETS_AN_OCTAVE)
