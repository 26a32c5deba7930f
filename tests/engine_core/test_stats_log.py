from __future__ import annotations

import logging

import pytest

from stepahead.engine_core.stats import DeviceClock, EngineStats
from stepahead.engine_core.stats_log import INTERVAL_NS, StatsLog

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 5 * SECOND

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def stats() -> EngineStats:
    return EngineStats(total_blocks=10, free_blocks=4, async_scheduling=True, async_reason="default")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(stats: EngineStats, clock: Clock, caplog: pytest.LogCaptureFixture) -> StatsLog:
    caplog.set_level(logging.INFO)
    return StatsLog(lambda: stats, clock)


def work(log: StatsLog, clock: Clock, stats: EngineStats, seconds: int, tokens_per_s: int) -> None:
    log.turn()
    for _ in range(seconds * 10):
        clock.now += SECOND // 10
        stats.generated_tokens += tokens_per_s // 10
        log.turn()


def test_a_busy_engine_tells_every_ten_seconds_how_fast_it_is(
    log: StatsLog, clock: Clock, stats: EngineStats, caplog: pytest.LogCaptureFixture
) -> None:
    stats.running = 3
    work(log, clock, stats, 9, 100)
    assert not caplog.records
    work(log, clock, stats, 1, 100)
    work(log, clock, stats, 10, 500)
    first, second = caplog.records
    assert first.levelno == second.levelno == logging.INFO
    assert "3 running, 0 waiting; 100.0 tokens/s; KV 60% used" in first.message
    assert "500.0 tokens/s" in second.message
    assert "async scheduling on (default)" in first.message
    assert "\n" not in first.message


def test_an_idle_engine_says_nothing_and_its_rest_does_not_count(
    log: StatsLog, clock: Clock, stats: EngineStats, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(4):
        work(log, clock, stats, 2, 100)
        log.idle()
        clock.now += 3600 * SECOND
        log.idle()
    assert not caplog.records
    assert stats.busy_ns == 8 * SECOND
    assert stats.tokens_per_s == 100
    work(log, clock, stats, 2, 100)
    assert [record.message.split("; ")[1] for record in caplog.records] == ["100.0 tokens/s"]


def test_requests_that_run_without_a_token_are_a_warning_that_says_so(
    log: StatsLog, clock: Clock, stats: EngineStats, caplog: pytest.LogCaptureFixture
) -> None:
    work(log, clock, stats, 10, 100)
    stats.running = 2
    work(log, clock, stats, 10, 0)
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
    assert "2 running, 0 waiting; NO TOKEN in the last 10 s" in caplog.records[1].message


def test_what_went_wrong_in_the_interval_is_counted_in_the_line(
    log: StatsLog, clock: Clock, stats: EngineStats, caplog: pytest.LogCaptureFixture
) -> None:
    stats.preemptions = 7
    work(log, clock, stats, 10, 100)
    stats.preemptions += 2
    stats.wasted_rows += 1
    work(log, clock, stats, 10, 100)
    assert "7 preemptions" in caplog.records[0].message
    assert "2 preemptions; 1 wasted rows" in caplog.records[1].message


def test_the_recent_rate_is_of_the_last_ten_seconds(log: StatsLog, clock: Clock, stats: EngineStats) -> None:
    work(log, clock, stats, 30, 100)
    log.refresh_rate()
    assert stats.recent_tokens_per_s == pytest.approx(100)
    work(log, clock, stats, 15, 0)
    log.refresh_rate()
    assert stats.recent_tokens_per_s == 0
    assert stats.tokens_per_s == pytest.approx(3000 / 45)


def test_a_short_run_has_a_recent_rate_too(log: StatsLog, clock: Clock, stats: EngineStats) -> None:
    log.refresh_rate()
    assert stats.recent_tokens_per_s == 0
    work(log, clock, stats, 1, 100)
    log.refresh_rate()
    assert stats.recent_tokens_per_s == pytest.approx(100)


def test_steps_and_the_gaps_between_them_are_counted_by_length(stats: EngineStats) -> None:
    device = DeviceClock(stats)
    device.step_done(1_000_000, 3_000_000, 0)
    device.step_done(3_100_000, 5_100_000, 0)
    device.idle()
    device.step_done(99_000_000, 101_000_000, 0)
    assert stats.step_time.count == 3
    assert stats.step_time.percentile_us(50) == pytest.approx(2000, rel=0.1)
    assert stats.device_gap.count == 1
    assert stats.device_gap.mean_us == pytest.approx(100)
    assert stats.device_busy == pytest.approx(6 / 6.1)


def test_statistics_of_an_interval_are_differences_and_the_state_is_the_present_one() -> None:
    stats = EngineStats(generated_tokens=5, running=4, prefix_tokens=10, prefix_hit_tokens=1)
    before = stats.copy()
    stats.generated_tokens, stats.running, stats.prefix_tokens, stats.prefix_hit_tokens = 8, 2, 20, 6
    stats.step_time.add(1.0)
    since = stats.since(before)
    assert (since.generated_tokens, since.running, since.prefix_hit_rate, since.step_time.count) == (3, 2, 0.5, 1)
    assert INTERVAL_NS == 10 * SECOND
