"""The front end with real processes behind it, and HashLM in them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from hash_model import write_hash_model
from stepahead import LLM, AsyncLLM, InvalidRequestError, SamplingParams

CLI = [sys.executable, "-c", "import sys; from stepahead.frontend.cli import main; sys.exit(main())", "generate"]
SETTINGS = {"device": "cpu", "load_format": "dummy", "num_kv_blocks": 400}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_hash_model(tmp_path_factory.mktemp("model") / "hash")


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory):
    return write_hash_model(tmp_path_factory.mktemp("model") / "slow", step_ms=30)


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, **SETTINGS) as made:
        yield made


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_four_ways_of_running_give_the_same_tokens(model, llm):
    params = [SamplingParams(max_tokens=30, temperature=t, seed=3) for t in (0, 1, 1)]
    prompts = ["The sea", "is wide", [5, 6, 7] * 20]
    expected = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    for executor, async_scheduling in (("uni", True), ("uni", False), ("mp", False)):
        with LLM(model, executor=executor, async_scheduling=async_scheduling, **SETTINGS) as other:
            assert other.async_scheduling is async_scheduling
            assert tokens_of(other.generate(prompts, params, use_tqdm=False)) == expected


def test_a_prompt_longer_than_the_model_touches_no_other_request(llm):
    with pytest.raises(InvalidRequestError, match="max_model_len=512"):
        llm.generate(["sea", [5] * 600], use_tqdm=False)
    assert llm.generate("sea", use_tqdm=False)[0].finished


def test_text_is_cut_at_a_stop_string_in_the_middle_of_what_would_have_come(llm):
    greedy = SamplingParams(temperature=0, max_tokens=60)
    whole = llm.generate("The sea", greedy, use_tqdm=False)[0].outputs[0].text
    stop = whole[20:24]
    (output,) = llm.generate("The sea", SamplingParams(temperature=0, max_tokens=60, stop=stop), use_tqdm=False)
    assert output.outputs[0].text == whole[: whole.index(stop)]
    assert output.outputs[0].stop_reason == stop


def test_a_call_whose_caller_has_stopped_waiting_holds_the_engine_core_up_no_longer(model):
    with LLM(model, **SETTINGS) as llm:
        with pytest.raises(TimeoutError):
            llm.collective_rpc(lambda worker: time.sleep(8), timeout=0.5)
        began = time.monotonic()
        llm.stats()  # the engine core's alone
        assert time.monotonic() - began < 4


def test_n_sequences_differ_and_are_what_their_seeds_give_alone(llm):
    together = llm.generate("sea", SamplingParams(n=3, seed=10, max_tokens=12), use_tqdm=False)[0].outputs
    alone = [llm.generate("sea", SamplingParams(seed=10 + i, max_tokens=12), use_tqdm=False)[0] for i in range(3)]
    assert [sequence.token_ids for sequence in together] == [output.outputs[0].token_ids for output in alone]
    assert len({tuple(sequence.token_ids) for sequence in together}) == 3


def test_logprobs_name_the_chosen_token_first(llm):
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    (sequence,) = output.outputs
    assert [next(iter(entries)) for entries in sequence.logprobs] == sequence.token_ids
    assert len(output.prompt_logprobs) == 3
    assert output.prompt_logprobs[0] is None
    assert [next(iter(entries)) for entries in output.prompt_logprobs[1:]] == [6, 7]


def test_a_repeated_prompt_is_read_from_the_prefix_cache(llm):
    prompt = list(range(10, 110))
    llm.generate([prompt], use_tqdm=False)
    (output,) = llm.generate([prompt], use_tqdm=False)
    assert output.num_cached_tokens == 96


async def test_64_streams_with_a_third_cancelled_are_right(model, llm):
    def params(index):
        return SamplingParams(max_tokens=40, seed=index)

    expected = llm.generate([[index + 5] for index in range(64)], [params(i) for i in range(64)], use_tqdm=False)
    async with AsyncLLM(model, **SETTINGS) as engine:

        async def stream(index):
            async for output in engine.generate([index + 5], params(index)):
                if index % 3 == 0 and len(output.outputs[0].token_ids) >= 7:
                    return None
            return output.outputs[0].token_ids

        results = await asyncio.gather(*(stream(index) for index in range(64)))
        stats = await engine.stats()
        while stats.running or stats.waiting:
            stats = await engine.stats()
        assert stats.free_blocks == stats.total_blocks
        for index, tokens in enumerate(results):
            assert tokens == (None if index % 3 == 0 else expected[index].outputs[0].token_ids)


def start_cli(*arguments):
    """A `stepahead generate` in a session of its own. Its whole family carries a mark in its environment."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*CLI, "--device", "cpu", "--load-format", "dummy", "--num-kv-blocks", "200", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "STEPAHEAD_TEST_MARK": mark},
        start_new_session=True,
    )
    return process, mark


def family(mark):
    """Pids of the processes that carry the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("STEPAHEAD_TEST_MARK") == mark:
                found.append(process.pid)
        except psutil.Error:
            continue  # it ended, or is not ours
    return found


def assert_all_gone(mark):
    deadline = time.monotonic() + 10
    while family(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert family(mark) == []


def test_the_command_line_answers_in_json(model):
    process, mark = start_cli("--model", model, "--prompt", "The sea", "--max-tokens", "8", "--json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    answer, final = map(json.loads, out.splitlines())
    assert len(answer["token_ids"]) == 8
    assert final["async_scheduling"] is True
    assert 0 < final["timings"]["device_busy"] <= 1
    assert_all_gone(mark)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_it_streams_ends_it_quietly_with_all_its_processes(slow_model, number, status):
    process, mark = start_cli("--model", slow_model, "--prompt", "The sea", "--max-tokens", "400", "--temperature", "0")
    assert process.stderr.readline().startswith("async scheduling: on")
    assert len(family(mark)) == 3
    time.sleep(0.3)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert err == ""
    assert_all_gone(mark)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("started", [2, 3])
def test_an_interruption_while_it_starts_leaves_nothing(model, started, number, status):
    """2: the engine core is there; 3: the worker too."""
    process, mark = start_cli("--model", model, "--prompt", "The sea", "--max-tokens", "400")
    deadline = time.monotonic() + 30
    while len(family(mark)) < started and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert "Traceback" not in err
    assert_all_gone(mark)


def test_a_reader_that_goes_away_ends_it_quietly(slow_model):
    process, mark = start_cli("--model", slow_model, "--prompt", "The sea", "--max-tokens", "400", "--temperature", "0")
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert "Traceback" not in process.stderr.read()
    assert_all_gone(mark)


def test_the_command_line_runs_without_standard_streams(model, tmp_path):
    arguments = ["--model", model, "--prompt", "sea", "--max-tokens", "4", "--device", "cpu", "--load-format", "dummy"]
    command = [*CLI, *arguments, "--num-kv-blocks", "200"]
    result = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], cwd=tmp_path)
    assert result.returncode == 0
