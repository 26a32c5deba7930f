"""Ranks that end, or never come, before the engine could have seen them; and what the others then say."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from external_site import Site, hello, lines, step
from external_workers import workers
from paper_device import generate_alone
from plans import PROMPT
from ports import port_below_the_ephemeral
from process_tools import DEADLINE, nothing_left_behind, wait_until
from stepahead import LLM
from stepahead.errors import ConfigError, WorkerError
from stepahead.worker.handshake import PROTOCOL, Gone, report
from stepahead.worker.process import ENGINE_HAS_FAILED
from tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Site]:
    caplog.set_level(logging.INFO, "stepahead")
    with nothing_left_behind(monkeypatch):
        place = Site()
        yield place
        place.close()


def say_gone(site: Site, *ranks: int, launch: str = "ours", seconds: float = 0.0, is_refused: bool = False) -> None:
    reason = "exited with code 7 on node9"
    report(Gone(PROTOCOL, launch, list(ranks), seconds, reason, is_refused), site.address, None)


def comes(site: Site, caplog: pytest.LogCaptureFixture, rank: int, launch: str = "ours") -> subprocess.Popen[str]:
    worker = site.worker(rank, launch=launch)
    wait_until(lambda: lines(caplog, f"rank {rank} has come"), "it comes")
    return worker


def test_a_rank_said_to_have_ended_ends_the_engine_and_the_ranks_that_wait_for_it(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.open(tensor_parallel_size=3)
    waiting = [comes(site, caplog, rank, "another") for rank in (0, 2)]
    say_gone(site, 1)
    with pytest.raises(WorkerError, match="worker rank 1: exited with code 7 on node9; see its own error output"):
        site.executor()
    for worker in waiting:
        _, errors = worker.communicate(timeout=DEADLINE)
        assert worker.returncode == 1, errors
        assert errors.count(ENGINE_HAS_FAILED) == 1
        assert "Traceback" not in errors


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_end_of_a_launch_whose_rank_has_come_is_believed_before_its_silence_shows(
    site: Site, caplog: pytest.LogCaptureFixture, is_refused: bool
) -> None:
    site.open(tensor_parallel_size=3)
    comes(site, caplog, 2)
    say_gone(site, 1, 2, is_refused=is_refused)
    with pytest.raises(WorkerError, match="worker rank 1: exited with code 7"):
        site.executor()


def test_the_end_of_another_launch_one_that_was_refused_or_one_before_our_time_changes_nothing(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.open(tensor_parallel_size=2)
    comes(site, caplog, 1)
    say_gone(site, 1, launch="another")
    say_gone(site, 2)
    say_gone(site, 0, is_refused=True)
    say_gone(site, 0, seconds=60.0)
    wait_until(lambda: lines(caplog, "said to be gone, which changes nothing"), "a line about it")
    comes(site, caplog, 0)
    executor = site.executor()
    say_gone(site, 1)  # too late: its links tell now
    assert [step(executor, i) for i in range(3)] == generate_alone(PROMPT, 3, (), 512)


def test_ranks_that_do_not_come_in_time_are_named(site: Site) -> None:
    site.open(tensor_parallel_size=3, join_timeout=1.0)
    stranger = site.stranger(zmq.DEALER)
    stranger.send(hello(rank=1, machine="elsewhere"))
    with pytest.raises(WorkerError, match=r"rank 0: has not come within 1 s \(join_timeout\); neither have ranks 2$"):
        site.executor()


def test_workers_of_an_engine_that_failed_by_itself_end_with_1(site: Site) -> None:
    site.open(tensor_parallel_size=2)
    processes = [site.worker(rank) for rank in (0, 1)]
    executor = site.executor()
    executor.has_failed = True
    executor.shutdown()
    for worker in processes:
        _, errors = worker.communicate(timeout=DEADLINE)
        assert worker.returncode == 1
        assert ENGINE_HAS_FAILED in errors


def test_workers_end_with_1_when_the_engine_core_refuses_what_they_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model("HashLM", tmp_path / "model")
    address = f"tcp://127.0.0.1:{port_below_the_ephemeral()}"
    links = {"executor": "external", "executor_address": address}
    with (
        nothing_left_behind(monkeypatch),
        workers(address, 1, codes=(1,)),
        pytest.raises(ConfigError, match="max_model_len"),
    ):
        LLM(str(model), **links, device="cpu", skip_tokenizer_init=True, num_kv_blocks=1, max_model_len=200)
