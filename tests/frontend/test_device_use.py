"""Busy share and gaps are of steady decode, and of the device's work alone."""

from __future__ import annotations

import pytest

from recordings import made_up_profile
from stepahead.frontend.device_use import DeviceStep, device_steps, device_use, steady_decode


def step(step_id: int, start: int, end: int, idle: int = 0, rows: int = 2, tokens: int = 2) -> DeviceStep:
    return DeviceStep(step_id, start, end, idle, rows, tokens)


def test_steps_are_read_from_the_device_lane_in_order() -> None:
    steps = device_steps(made_up_profile(steps=3))
    assert [s.step_id for s in steps] == [1, 2, 3]
    assert [s.num_tokens for s in steps] == [12, 4, 4]
    assert all(s.busy_ns == 5_000_000 for s in steps)


def test_busy_is_work_over_whole_periods() -> None:
    use = device_use(device_steps(made_up_profile(step_ms=5, gap_ms=1)))
    assert use.busy == pytest.approx(5 / 6)
    assert use.steps_per_s == pytest.approx(1000 / 6)
    assert use.step_ms == pytest.approx(5)
    assert use.gap_us_mean == pytest.approx(1000)


def test_standing_still_between_forward_and_sampling_is_a_gap_not_work() -> None:
    use = device_use([step(1, 0, 1000, idle=400), step(2, 1100, 2000), step(3, 2100, 3000)])
    assert use.busy == pytest.approx((600 + 900) / 2100)
    assert use.gaps_us == pytest.approx([0.5, 0.1])


def test_p99_is_the_gap_that_99_of_100_do_not_exceed() -> None:
    starts = [0]
    for gap in [*[10] * 98, 500, 900]:
        starts.append(starts[-1] + 100 + gap)
    use = device_use([step(i, start, start + 100) for i, start in enumerate(starts)])
    assert use.gap_us_p99 == pytest.approx(0.5)


def test_steady_decode_leaves_out_prefill_ramp_and_tail() -> None:
    ramp = [step(1, 0, 1, tokens=9), step(2, 1, 2, rows=1, tokens=1)]
    steady = [step(i, i, i + 1) for i in range(3, 23)]
    tail = [step(23, 23, 24, rows=1, tokens=1), step(24, 24, 25)]
    assert steady_decode([*ramp, *steady, *tail], 2) == steady[2:-1]


def test_a_run_that_was_never_steady_has_no_steady_steps() -> None:
    assert steady_decode([step(1, 0, 1, tokens=9)], 2) == []
