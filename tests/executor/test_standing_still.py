"""Processes that stand still: for a short while nothing is lost by it, and a long one is noticed from both ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest

from external_workers import workers
from oracle import token_ids
from process_tools import DEADLINE, nothing_left_behind, wait_until
from stepahead import LLM, EngineDeadError, SamplingParams
from tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(100)

TIMEOUT, SHORT = 4.0, 1.5
PROMPTS = [[5], [7, 8, 9], list(range(10, 40))]
MAX_TOKENS = 100


@pytest.fixture(autouse=True)
def _nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_left_behind(monkeypatch):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose run takes some three seconds."""
    return str(make_tiny_model("HashLM", tmp_path_factory.mktemp("model"), step_ms=30.0))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of the same model in one process, without the waiting."""
    quick = make_tiny_model("HashLM", tmp_path_factory.mktemp("quick"))
    with LLM(str(quick), device="cpu", skip_tokenizer_init=True, executor="uni") as llm:
        return tokens(llm)


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [token_ids(output) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@contextlib.contextmanager
def run_of_two_ranks(folder: str, codes: tuple[int, ...]) -> Iterator[tuple[LLM, list[subprocess.Popen[str]], Future]]:
    """An engine with two workers of somebody else's, in the middle of a run. codes: how the workers may end."""
    with tempfile.TemporaryDirectory() as private, ThreadPoolExecutor(1) as pool:
        address = f"ipc://{private}/plans"
        links = {"executor": "external", "executor_address": address, "worker_timeout": TIMEOUT}
        with workers(address, 2, codes) as processes:
            settings = {"device": "cpu", "skip_tokenizer_init": True, "pipeline_parallel_size": 2, **links}
            with LLM(folder, **settings) as llm:
                run = pool.submit(tokens, llm)
                wait_until(lambda: llm.stats().generated_tokens > 10, "a run's first tokens")
                yield llm, processes, run


def engine_core() -> psutil.Process:
    (engine,) = [c for c in psutil.Process().children() if "stepahead.engine_core.process:main" in c.cmdline()]
    return engine


@pytest.mark.parametrize("who", ["engine", "worker"])
def test_a_run_goes_on_after_a_process_stood_still_for_a_while(folder: str, alone: list[list[int]], who: str) -> None:
    with run_of_two_ranks(folder, (0,)) as (_, processes, run):
        stopped = engine_core().pid if who == "engine" else processes[1].pid
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(SHORT)
        os.kill(stopped, signal.SIGCONT)
        assert run.result(DEADLINE) == alone


def test_a_worker_that_stands_still_for_long_is_named_and_leaves_when_it_goes_on(folder: str) -> None:
    with run_of_two_ranks(folder, (0, 1)) as (_, processes, run):
        os.kill(processes[1].pid, signal.SIGSTOP)
        try:
            with pytest.raises(
                EngineDeadError, match=rf"worker rank 1: was not heard of for {TIMEOUT:g} seconds \(pid"
            ):
                run.result(TIMEOUT + DEADLINE)
        finally:
            os.kill(processes[1].pid, signal.SIGCONT)


def test_workers_of_an_engine_that_stands_still_for_long_leave_and_it_says_so_when_it_goes_on(folder: str) -> None:
    with run_of_two_ranks(folder, (1,)) as (_, processes, run):
        engine = engine_core()
        engine.suspend()
        try:
            assert [process.wait(TIMEOUT + DEADLINE) for process in processes] == [1, 1]
        finally:
            engine.resume()
        with pytest.raises(EngineDeadError, match=r"worker rank \d: is gone \(pid \d+ on .*see its own error output"):
            run.result(DEADLINE)
        for process in processes:
            assert process.stderr is not None
            said = [line for line in process.stderr.read().splitlines() if not re.match(r"\s*$", line)]
            assert len(said) == 1, said
            assert f"no sign of the engine for {TIMEOUT:g} seconds; leaving" in said[0]
