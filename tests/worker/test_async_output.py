"""The copy thread sends what it was given, in order, and turns what failed into a message."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from step_driver import StepDriver, greedy_tokens
from stepahead.worker.async_output import WorkerAsyncOutputCopy
from stepahead.worker.messages import CallReply, Failure, StepReply, WorkerReply

PROMPT = [3, 1, 4]


class Sent:
    """Collects replies, with the thread that sent each."""

    def __init__(self) -> None:
        self.replies: list[WorkerReply] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self, reply: WorkerReply) -> None:
        self.replies.append(reply)
        self.threads.add(threading.current_thread())


@pytest.fixture
def driver() -> Iterator[StepDriver]:
    driver = StepDriver()
    driver.admit(0, "a", PROMPT)
    yield driver
    driver.close()


def test_replies_leave_in_the_order_in_which_they_were_put(driver: StepDriver) -> None:
    sent = Sent()
    copier = WorkerAsyncOutputCopy(sent, rank=0)
    copier.start()
    gate = threading.Event()
    driver.device.launch(partial(gate.wait, 30))
    copier.put(driver.start())
    copier.put(CallReply(7, 0, "value"))
    copier.put(driver.start())
    assert sent.replies == []
    gate.set()
    copier.close()
    kinds = [type(reply) for reply in sent.replies]
    assert kinds == [StepReply, CallReply, StepReply]
    tokens = [reply.output.sampled[0, 0] for reply in sent.replies if isinstance(reply, StepReply)]
    assert tokens == greedy_tokens(PROMPT, 2)


def test_all_sends_run_in_the_one_thread(driver: StepDriver) -> None:
    sent = Sent()
    copier = WorkerAsyncOutputCopy(sent, rank=0)
    copier.start()
    copier.put(driver.start())
    copier.close()
    assert sent.threads == {copier}


def test_a_step_that_failed_on_the_device_is_sent_as_a_failure_with_its_traceback(driver: StepDriver) -> None:
    def broken_kernel() -> None:
        raise RuntimeError("no such block: 12")

    sent = Sent()
    copier = WorkerAsyncOutputCopy(sent, rank=3)
    copier.start()
    driver.device.launch(broken_kernel)
    copier.put(driver.start())
    copier.close()
    (reply,) = sent.replies
    assert isinstance(reply, Failure)
    assert (reply.rank, reply.message, reply.user_error) == (3, "RuntimeError: no such block: 12", False)
    assert "in broken_kernel" in reply.traceback


def _raise_os_error(*_: object) -> None:
    raise OSError("socket is gone")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_sending_raises_ends_the_thread_and_is_kept() -> None:
    copier = WorkerAsyncOutputCopy(_raise_os_error, 0)
    copier.start()
    copier.put(CallReply(1, 0))
    copier.close()
    assert not copier.is_alive()
    assert isinstance(copier.error, OSError)


def test_get_output_times_out_and_can_be_asked_again(driver: StepDriver) -> None:
    gate = threading.Event()
    driver.device.launch(partial(gate.wait, 30))
    output = driver.start()
    with pytest.raises(TimeoutError):
        output.get_output(timeout=0.01)
    gate.set()
    assert output.get_output(timeout=30).sampled[0, 0] == greedy_tokens(PROMPT, 1)[0]
