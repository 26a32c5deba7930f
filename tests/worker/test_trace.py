"""Lanes record what ran between start() and stop(), and nothing else."""

from __future__ import annotations

import time
from itertools import pairwise

from step_driver import StepDriver, hash_model, make_config
from stepahead.worker import trace
from stepahead.worker.device_cpu import CpuDevice
from stepahead.worker.model_runner import ModelRunner
from stepahead.worker.trace import DEVICE, Lane, Recorder


def two_spans(lane: Lane) -> None:
    lane.begin()
    lane.end("prepare", 1)
    lane.end("launch", 2)


def test_spans_follow_each_other_without_a_hole() -> None:
    lane = Lane("worker")
    lane.start()
    before = time.monotonic_ns()
    two_spans(lane)
    first, second = lane.stop().spans
    assert (first.name, first.step_id, second.name, second.step_id) == ("prepare", 1, "launch", 2)
    assert before <= first.start_ns <= first.end_ns == second.start_ns <= second.end_ns <= time.monotonic_ns()


def test_a_lane_that_is_off_records_nothing() -> None:
    lane = Lane("worker")
    two_spans(lane)
    lane.add("forward", 1, 2, 3, 4, 5)
    lane.start()
    assert lane.stop().spans == []
    two_spans(lane)
    lane.start()
    assert lane.stop().spans == []


def test_what_began_before_the_recording_is_not_part_of_it() -> None:
    lane = Lane("worker")
    lane.start()
    lane.begin()
    lane.stop()
    lane.start()
    lane.end("prepare", 1)
    assert lane.stop().spans == []


def test_a_lane_keeps_its_latest_spans_and_says_that_it_was_cut(monkeypatch) -> None:
    monkeypatch.setattr(trace, "MAX_SPANS", 3)
    lane = Lane("worker")
    lane.start()
    lane.begin()
    for step_id in range(5):
        lane.end("prepare", step_id)
    recorded = lane.stop()
    assert recorded.cut
    assert [span.step_id for span in recorded.spans] == [2, 3, 4]


def test_a_recorder_starts_and_stops_all_its_lanes() -> None:
    recorder = Recorder("worker 0")
    lanes = [recorder.lane("worker"), recorder.lane("output copy")]
    recorder.start()
    for lane in lanes:
        two_spans(lane)
    recorded = recorder.stop()
    assert recorded.name == "worker 0"
    assert [(lane.name, len(lane.spans)) for lane in recorded.lanes] == [("worker", 2), ("output copy", 2)]
    assert not any(lane.enabled for lane in lanes)


class LateSampling(CpuDevice):
    """Nothing more is launched until `late` seconds after the forward has ended."""

    late = 0.02

    def launch_timed(self, work):  # type: ignore[no-untyped-def]
        timed = super().launch_timed(work)
        self.record().wait(10)
        time.sleep(self.late)
        return timed


def run_steps(device: CpuDevice, lane: Lane) -> StepDriver:
    driver = StepDriver(device=device)
    driver.runner = ModelRunner(
        make_config(), device, hash_model(), num_blocks=256, max_model_len=64, lane=lane
    )  # fmt: skip
    driver.admit(0, "a", [3, 1, 4])
    driver.run(4)
    driver.close()
    return driver


def test_the_device_lane_has_forward_and_sample_of_each_step_with_its_size() -> None:
    lane = Lane(DEVICE)
    lane.start()
    run_steps(CpuDevice(), lane)
    spans = lane.stop().spans
    assert [(span.name, span.step_id) for span in spans] == [
        (name, step_id) for step_id in range(4) for name in ("forward", "sample")
    ]
    assert [(span.num_rows, span.num_tokens) for span in spans[::2]] == [(1, 3), (1, 1), (1, 1), (1, 1)]
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))


def test_a_device_that_waits_for_its_sampling_to_be_launched_is_idle() -> None:
    driver = run_steps(LateSampling(), Lane(DEVICE))
    for output in driver.outputs:
        assert LateSampling.late * 1e9 <= output.device_idle_ns < output.device_end_ns - output.device_start_ns
