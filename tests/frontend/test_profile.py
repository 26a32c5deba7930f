"""A real run's recording holds every lane on one clock, and is what Perfetto reads."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest

from hash_model import write_hash_model
from recordings import made_up_profile
from stepahead import LLM, AsyncLLM, SamplingParams
from stepahead.frontend.profile import LANES, Profile, chrome_trace, write_trace
from stepahead.worker.trace import DEVICE, ENGINE_CORE, FRONT_END, OUTPUT_COPY, WORKER

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5]]
SETTINGS = {"device": "cpu", "num_kv_blocks": 64, "max_num_seqs": 4, "max_model_len": 128, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_hash_model(tmp_path_factory.mktemp("hash") / "model", step_ms=2, tokenizer=False)


@pytest.fixture(scope="module", params=["sync", "async"])
def recorded(request, model, tmp_path_factory) -> tuple[Profile, Profile, dict]:
    """(a recording, one in which nothing ran, the file of the first)."""
    path = tmp_path_factory.mktemp("out") / "own.json"
    with LLM(model, async_scheduling=request.param == "async", **SETTINGS) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.start_profile()
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        profile = llm.stop_profile(path)
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.start_profile()
        nothing = llm.stop_profile(None)
    assert profile.mode == request.param
    return profile, nothing, json.loads(path.read_text())


def test_every_lane_of_every_process_is_recorded(recorded) -> None:
    profile, _, _ = recorded
    names = {lane.name: {span.name for span in lane.spans} for lane in profile.lanes()}
    assert names == {
        FRONT_END: {"process"},
        ENGINE_CORE: {"schedule", "launch", "wait", "update"},
        WORKER: {"prepare", "launch"},
        DEVICE: {"forward", "sample"},
        OUTPUT_COPY: {"wait", "push"},
    }
    assert len({process.pid for process in profile.processes}) == 3


def test_nothing_is_recorded_outside_start_and_stop(recorded) -> None:
    _, nothing, _ = recorded
    assert [lane.spans for lane in nothing.lanes()] == [[]] * len(LANES)


def test_spans_of_a_lane_never_overlap(recorded) -> None:
    for lane in recorded[0].lanes():
        assert all(span.start_ns <= span.end_ns for span in lane.spans)
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(lane.spans)), lane.name


def test_a_steps_way_through_the_processes_is_in_order_on_one_clock(recorded) -> None:
    profile, _, _ = recorded
    times = {(lane.name, s.name, s.step_id): s for lane in profile.lanes() for s in lane.spans}
    steps = [span.step_id for span in profile.lane(DEVICE).spans if span.name == "forward"]
    assert len(steps) >= PARAMS.max_tokens
    for step in steps:
        scheduled, prepared = times[ENGINE_CORE, "schedule", step], times[WORKER, "prepare", step]
        forward, sample = times[DEVICE, "forward", step], times[DEVICE, "sample", step]
        pushed, updated = times[OUTPUT_COPY, "push", step], times[ENGINE_CORE, "update", step]
        assert scheduled.end_ns <= prepared.start_ns <= forward.start_ns
        assert forward.end_ns - forward.start_ns >= 2_000_000
        assert forward.end_ns <= sample.start_ns
        assert sample.end_ns <= pushed.start_ns <= updated.start_ns <= times[FRONT_END, "process", step].start_ns


def test_only_with_async_scheduling_is_a_step_planned_before_the_one_before_it_has_ended(recorded) -> None:
    profile, _, _ = recorded
    ends = {s.step_id: s.end_ns for s in profile.lane(DEVICE).spans if s.name == "sample"}
    plans = {s.step_id: s.end_ns for s in profile.lane(ENGINE_CORE).spans if s.name == "schedule"}
    ahead = [step for step, end in ends.items() if step + 1 in plans and plans[step + 1] < end]
    assert bool(ahead) == (profile.mode == "async")


def test_the_file_names_processes_and_threads_and_has_complete_events(recorded) -> None:
    profile, _, trace = recorded
    events = trace["traceEvents"]
    meta = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum(len(lane.spans) for lane in profile.lanes())
    for event in spans:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["args"]["step"] > 0
        assert meta["process_name", event["pid"], 0]["name"].startswith(f"{profile.mode}: ")
        assert meta["thread_name", event["pid"], event["tid"]]["name"] == LANES[event["cat"]]
    assert trace["otherData"] == {
        "clock": "CLOCK_MONOTONIC", "start_ns": {profile.mode: profile.start_ns}, "cut_lanes": [],
    }  # fmt: skip


def test_each_arrow_leaves_one_span_and_ends_in_a_later_one_of_its_step() -> None:
    events = chrome_trace([made_up_profile("sync"), made_up_profile("async")])["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 20 * 7

    def inside(arrow: dict) -> list[int]:
        return [
            e["args"]["step"]
            for e in events
            if e["ph"] == "X"
            and (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])
            and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]
        ]

    for name, start in starts.items():
        assert start["ts"] <= ends[name]["ts"]
        assert start["args"]["step"] in inside(start)
        assert start["args"]["step"] in inside(ends[name])


def test_both_runs_of_a_file_are_processes_of_their_own_that_begin_at_zero() -> None:
    events = chrome_trace([made_up_profile("sync"), made_up_profile("async")])["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(names) == 6
    for mode in ("sync", "async"):
        pids = {pid for pid, name in names.items() if name.startswith(f"{mode}: ")}
        assert len(pids) == 3
        assert min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] in pids) == 0


def test_a_folder_gets_a_trace_json(tmp_path) -> None:
    path = write_trace(tmp_path / "new", [made_up_profile()])
    assert path == tmp_path / "new" / "trace.json"
    assert json.loads(path.read_text())["traceEvents"]


def test_an_async_llm_and_a_worker_in_the_engine_core_record_too(model, tmp_path) -> None:
    async def run() -> Profile:
        async with AsyncLLM(model, executor="uni", **SETTINGS) as engine:
            await engine.start_profile()
            async for _ in engine.generate(PROMPTS[0], PARAMS):
                pass
            return await engine.stop_profile(tmp_path)

    profile = asyncio.run(run())
    assert len(profile.lane(DEVICE).spans) >= 2 * PARAMS.max_tokens
    assert {span.name for span in profile.lane(FRONT_END).spans} == {"process"}
    assert (tmp_path / "trace.json").exists()
