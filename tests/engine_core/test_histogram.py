from __future__ import annotations

import msgspec
import numpy as np
import pytest

from stepahead.engine_core.histogram import BOUNDS_US, Histogram


@pytest.mark.parametrize("percent", [1, 50, 90, 99, 100])
def test_a_percentile_is_at_most_ten_percent_off(percent: float) -> None:
    values = np.random.default_rng(0).lognormal(7, 2, 4000)
    histogram = Histogram()
    for value in values.tolist():
        histogram.add(value)
    assert histogram.count == 4000
    assert histogram.mean_us == pytest.approx(values.mean())
    assert histogram.percentile_us(percent) == pytest.approx(np.percentile(values, percent, method="higher"), rel=0.1)


def test_no_value_is_too_small_or_too_large() -> None:
    histogram = Histogram()
    for value in (-1.0, 0.0, 1e-3, 1.0, 1e9):
        histogram.add(value)
    assert histogram.counts[0] == 4
    assert histogram.counts[-1] == 1
    assert histogram.percentile_us(50) == 0
    assert histogram.percentile_us(100) == pytest.approx(BOUNDS_US[-1], rel=0.1)
    assert histogram.max_us == 1e9


def test_a_percentile_never_exceeds_the_largest_value() -> None:
    histogram = Histogram()
    histogram.add(1000.0)
    assert histogram.percentile_us(99) <= 1000.0


def test_an_empty_histogram_answers_zero() -> None:
    assert Histogram().percentile_us(99) == Histogram().mean_us == 0


def test_subtracting_an_earlier_copy_leaves_what_was_added_since() -> None:
    histogram = Histogram()
    histogram.add(10.0)
    before = histogram.copy()
    histogram.add(300.0)
    histogram.add(300.0)
    since = histogram.since(before)
    assert since.count == 2
    assert since.mean_us == pytest.approx(300)
    assert before.count == 1


def test_a_histogram_survives_the_way_to_the_front_end() -> None:
    histogram = Histogram()
    histogram.add(42.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(histogram), type=Histogram) == histogram
