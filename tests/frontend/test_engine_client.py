"""The engine as a user's process sees it: real processes, a worker without torch."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paper_device import generate_alone
from paper_worker import Inbox, client_for, request
from process_tools import UserScript, alive, nothing_left_behind, wait_until
from stepahead.config import parse_settings, resolve
from stepahead.engine_core.messages import AbortRequests
from stepahead.errors import ConfigError, EngineDeadError, StepaheadError
from stepahead.frontend import engine_client
from stepahead.frontend.engine_client import EngineClient
from stepahead.worker.model_config import ModelConfig

pytestmark = pytest.mark.timeout(60)

EXECUTORS = ("PaperMultiproc", "PaperUni")

GENERATE_FOR_EVER = """
client, inbox = client_for(step_ms=5)
from paper_worker import request
client.send(request(1, max_tokens=400))
inbox.wait_for(lambda inbox: inbox.tokens)
say(core=client.info.pid, worker=client.info.worker_pids[0])
"""


@pytest.fixture(autouse=True)
def _nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nothing_left_behind(monkeypatch):
        yield


# ---- working ------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
def test_many_requests_get_the_tokens_that_each_would_get_alone(executor: str) -> None:
    client, inbox = client_for(executor)
    prompts = {i: (i + 1, 2, 3) for i in range(12)}
    for i, prompt in prompts.items():
        client.send(request(i, prompt, max_tokens=5 + i))
    inbox.wait_for(lambda inbox: len(inbox.finished) == len(prompts))
    client.close()
    for i, prompt in prompts.items():
        assert inbox.tokens[i] == generate_alone(prompt, 5 + i, (), 512)


def test_an_abort_ends_its_request_and_no_other() -> None:
    client, inbox = client_for(step_ms=2)
    client.send(request(1, max_tokens=400))
    client.send(request(2, (9, 9), max_tokens=30))
    inbox.wait_for(lambda inbox: inbox.tokens[1])
    client.send(AbortRequests([1]))
    inbox.wait_for(lambda inbox: 2 in inbox.finished)
    stats = client.stats()
    client.close()
    assert inbox.tokens[2] == generate_alone((9, 9), 30, (), 512)
    assert stats.running == 0
    assert stats.free_blocks == stats.total_blocks


def test_a_refused_request_is_told_why_and_the_engine_goes_on() -> None:
    client, inbox = client_for()
    client.send(request(1, [1] * 600))
    client.send(request(2))
    inbox.wait_for(lambda inbox: len(inbox.finished) == 2)
    client.close()
    assert inbox.finished[1].reason == "error"
    assert "600" in inbox.finished[1].message
    assert inbox.finished[2].reason == "length"


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_callable_runs_in_every_worker(executor: str) -> None:
    client, _ = client_for(executor)
    offset = 40
    assert client.call("collective_rpc", lambda worker, x: [worker.rank, offset + x], [2]) == [[0, 42]]
    client.close()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_failing_call_raises_the_workers_error_and_the_engine_goes_on(executor: str) -> None:
    client, _ = client_for(executor)
    with pytest.raises(StepaheadError, match="ValueError: no such thing"):
        client.call("collective_rpc", "explode", ["no such thing"])
    with pytest.raises(StepaheadError, match=r"result.*cannot travel.*ndarray"):
        client.call("collective_rpc", "array")
    with pytest.raises(StepaheadError, match="no method 'juggle'"):
        client.call("juggle")
    with pytest.raises(TypeError, match="argument of stats cannot travel"):
        client.call("stats", {1, 2}, object())
    assert client.call("collective_rpc", "add", [2, 3]) == [5]
    client.close()


def test_a_call_can_time_out_and_its_late_reply_disturbs_nobody() -> None:
    client, _ = client_for()
    with pytest.raises(TimeoutError, match=r"collective_rpc within 0\.1 seconds"):
        client.call("collective_rpc", lambda worker: time.sleep(0.5), timeout=0.1)
    assert client.call("collective_rpc", "add", [2, 3]) == [5]
    client.close()


def test_a_call_from_on_message_is_refused_instead_of_waiting_for_itself() -> None:
    client, inbox = client_for()
    raised = []

    def call(_message: object) -> None:
        with pytest.raises(RuntimeError, match="wait for itself") as info:
            client.call("stats")
        raised.append(info.value)

    client._connection._on_message = call
    client.send(request(1, max_tokens=1))
    wait_until(lambda: raised, "on_message called")
    client.close()
    assert not inbox.failures


def test_threads_can_send_at_once() -> None:
    client, inbox = client_for()
    threads = [
        threading.Thread(
            target=lambda base: [client.send(request(base + i, max_tokens=2)) for i in range(20)], args=(b,)
        )
        for b in (100, 200, 300, 400)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    inbox.wait_for(lambda inbox: len(inbox.finished) == 80)
    assert not inbox.failures
    client.close()


def test_an_idle_engine_burns_no_cpu() -> None:
    client, inbox = client_for()
    client.send(request(1, max_tokens=2))
    inbox.wait_for(lambda inbox: inbox.finished)
    processes = [psutil.Process(pid) for pid in (client.info.pid, *client.info.worker_pids)]

    def cpu_seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def asleep() -> bool:
        before = cpu_seconds()
        time.sleep(0.4)
        return cpu_seconds() - before <= 0.01  # one tick of the clock

    wait_until(asleep, "0.4 seconds without work")
    assert client.stats().running == 0, "it sleeps, and answers"
    client.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_real_worker_answers_alike_in_both_executors_and_only_it_loads_torch() -> None:
    tokens = []
    for executor in ("mp", "uni"):
        model = ModelConfig(architecture="HashLM", vocab_size=64, max_position=128)
        chosen = {"executor": executor, "device": "cpu", "load_format": "dummy", "num_kv_blocks": 32}
        inbox = Inbox()
        client = EngineClient(resolve(parse_settings("hash-lm", chosen), model, True), inbox)
        for i in range(4):
            client.send(request(i, (i, 2, 3), max_tokens=12))
        inbox.wait_for(lambda inbox: len(inbox.finished) == 4)
        mapped = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (client.info.pid, *client.info.worker_pids)}
        client.close()
        assert "libtorch" in mapped[client.info.worker_pids[0]]
        assert executor == "uni" or "torch" not in mapped[client.info.pid]
        tokens.append([inbox.tokens[i] for i in range(4)])
    assert tokens[0] == tokens[1]


# ---- starting -----------------------------------------------------------------------------------


def test_a_worker_that_cannot_start_shows_its_own_traceback() -> None:
    with pytest.raises(EngineDeadError, match="RuntimeError: this worker cannot start") as info:
        client_for("BadMultiproc")
    assert "paper_worker.py" in str(info.value)
    assert 'raise RuntimeError("this worker cannot start")' in str(info.value)


def test_a_bad_setting_found_by_a_worker_is_one_line() -> None:
    with pytest.raises(ConfigError) as info:
        client_for("RefusingMultiproc")
    assert str(info.value) == "model='nowhere': no such folder"


def test_a_bad_setting_found_by_the_engine_core_is_one_line() -> None:
    with pytest.raises(ConfigError) as info:
        client_for(num_kv_blocks=2, max_model_len=512)
    assert str(info.value).startswith("max_model_len=512 does not fit the KV pool of 32 tokens")
    assert "\n" not in str(info.value)


def test_a_worker_that_vanishes_while_it_loads_is_reported_with_its_exit_code() -> None:
    with pytest.raises(EngineDeadError, match="worker rank 0: exited with code 7"):
        client_for("DyingMultiproc")


def test_an_engine_core_that_cannot_even_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "ENGINE_MAIN", "stepahead.no_such_module:main")
    with pytest.raises(EngineDeadError, match="exited with code 1 while it started"):
        client_for()


def test_a_script_needs_no_main_guard() -> None:
    script = UserScript(
        """
client, inbox = client_for()
from paper_worker import request
client.send(request(1, max_tokens=3))
inbox.wait_for(lambda inbox: inbox.finished)
say(tokens=inbox.tokens[1])
"""
    )
    assert script.facts()["tokens"] == generate_alone((1, 2, 3), 3, (), 512)
    assert script.end() == (0, "")


def test_ctrl_c_while_the_model_loads_ends_everything() -> None:
    script = UserScript("say(); client_for('SlowMultiproc')")
    script.facts()
    wait_until(lambda: len(psutil.Process(script.process.pid).children(recursive=True)) == 2, "the worker is there")
    os.killpg(script.process.pid, signal.SIGINT)
    code, errors = script.end()
    assert code != 0
    assert errors.count("KeyboardInterrupt") == 1


def test_sigkill_of_the_user_while_the_model_loads_leaves_nothing() -> None:
    script = UserScript("say(); client_for('SlowMultiproc')")
    script.facts()
    user = psutil.Process(script.process.pid)
    wait_until(lambda: len(user.children(recursive=True)) == 2, "the worker is there")
    pids = [child.pid for child in user.children(recursive=True)]
    script.process.kill()
    script.end()
    wait_until(lambda: not alive(pids), "engine core and worker gone")
    assert os.listdir(os.environ["TMPDIR"]) == []


@pytest.mark.parametrize("moment", ["before the engine core knows", "the engine core is there", "the worker is there"])
def test_sigterm_to_the_whole_group_while_it_starts_leaves_nothing(moment: str) -> None:
    """It kills a script on the spot: the engine core removes the socket directory."""
    script = UserScript("say(); client_for('SlowMultiproc')")
    script.facts()
    user = psutil.Process(script.process.pid)
    if moment == "before the engine core knows":
        wait_until(lambda: os.listdir(os.environ["TMPDIR"]) or user.children(), "the engine core is on its way")
    else:
        number = 1 if moment == "the engine core is there" else 2
        wait_until(lambda: len(user.children(recursive=True)) == number, moment)
    pids = [child.pid for child in user.children(recursive=True)]
    os.killpg(script.process.pid, signal.SIGTERM)
    assert script.end()[0] == -signal.SIGTERM
    wait_until(lambda: not alive(pids), "engine core and worker gone")


# ---- ending -------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
def test_close_ends_a_busy_engine_and_may_be_repeated(executor: str) -> None:
    client, inbox = client_for(executor, step_ms=5)
    client.send(request(1, max_tokens=400))
    inbox.wait_for(lambda inbox: inbox.tokens)
    pids = [client.info.pid, *client.info.worker_pids]
    start = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - start < 5
    assert not alive([pid for pid in pids if pid != os.getpid()])
    assert not inbox.failures
    with pytest.raises(EngineDeadError, match="has been closed"):
        client.send(request(2))
    with pytest.raises(EngineDeadError, match="has been closed"):
        client.call("stats")


def test_close_ends_an_engine_whose_worker_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "STOP_GRACE", 0.5)
    client, _ = client_for(step_ms=60_000)
    client.send(request(1))

    def hangs() -> bool:
        try:
            client.call("stats", timeout=0.2)
        except TimeoutError:
            return True
        return False

    wait_until(hangs, "the engine waits for the worker")
    start = time.monotonic()
    client.close()
    assert time.monotonic() - start < 8


def test_close_may_be_called_from_on_message() -> None:
    client, _ = client_for()
    client._connection._on_message = lambda _message: client.close()
    client.send(request(1, max_tokens=100))
    wait_until(lambda: not alive([client.info.pid]), "the engine core gone")
    with pytest.raises(EngineDeadError):
        client.stats()


def test_a_forgotten_client_ends_its_engine() -> None:
    client, _ = client_for()
    pids = [client.info.pid, *client.info.worker_pids]
    assert alive(pids) == pids
    del client
    gc.collect()
    wait_until(lambda: not alive(pids), "engine core and workers gone")


def test_an_on_message_that_raises_ends_the_engine_instead_of_hanging_it() -> None:
    client, inbox = client_for()

    def fail(message: object) -> None:
        inbox(message)  # type: ignore[arg-type]
        if not inbox.failures:
            raise ValueError("a bug in the front end")

    client._connection._on_message = fail
    client.send(request(1))
    assert "a bug in the front end" in inbox.failure().message
    client.close()


def test_a_worker_that_raises_in_a_step_ends_the_engine_at_once_with_its_traceback() -> None:
    client, inbox = client_for()

    def sabotage(worker: object) -> None:
        def execute_model(plan: object) -> None:
            raise ArithmeticError("the device is on fire")

        worker.execute_model = execute_model  # type: ignore[attr-defined]

    client.call("collective_rpc", sabotage)
    start = time.monotonic()
    client.send(request(1))
    failure = inbox.failure()
    assert time.monotonic() - start < 5
    assert failure.message == "worker rank 0: ArithmeticError: the device is on fire"
    assert "in execute_model" in failure.traceback
    with pytest.raises(EngineDeadError, match="the device is on fire"):
        client.send(request(2))
    client.close()
    assert len(inbox.failures) == 1


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    ("executor", "victim"),
    [("PaperMultiproc", "engine core"), ("PaperMultiproc", "worker"), ("PaperUni", "engine core")],
)
def test_the_client_is_told_at_once_who_died_and_nothing_stays(
    executor: str, victim: str, sent: signal.Signals, busy: bool
) -> None:
    client, inbox = client_for(executor, step_ms=5)
    if busy:
        client.send(request(1, max_tokens=400))
        inbox.wait_for(lambda inbox: inbox.tokens)
    core, worker = client.info.pid, client.info.worker_pids[0]
    os.kill(core if victim == "engine core" else worker, sent)
    message = inbox.failure().message
    assert sent.name in message
    assert ("worker rank 0" in message) == (victim == "worker")
    wait_until(lambda: not alive([core, worker]), "both processes gone")
    with pytest.raises(EngineDeadError, match=sent.name):
        client.call("stats")
    client.close()


def test_a_call_in_flight_raises_when_the_engine_dies() -> None:
    client, _ = client_for()
    threading.Timer(0.2, os.kill, (client.info.worker_pids[0], signal.SIGKILL)).start()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.call("collective_rpc", lambda worker: time.sleep(30))
    client.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_ends_with_a_killed_user_process(sent: signal.Signals) -> None:
    script = UserScript(GENERATE_FOR_EVER + "time.sleep(60)")
    pids = list(script.facts().values())
    os.kill(script.process.pid, sent)
    assert script.end()[0] == -sent
    wait_until(lambda: not alive(pids), "engine core and worker gone")


def test_ctrl_c_interrupts_the_user_alone_and_the_engine_ends_in_order() -> None:
    script = UserScript(
        GENERATE_FOR_EVER.replace("say(", "dict(")
        + """
try:
    say(core=client.info.pid, worker=client.info.worker_pids[0])
    time.sleep(60)
except KeyboardInterrupt:
    n = len(inbox.tokens[1])
    inbox.wait_for(lambda inbox: len(inbox.tokens[1]) > n)
    say(failures=len(inbox.failures))
"""
    )
    pids = list(script.facts().values())
    os.killpg(script.process.pid, signal.SIGINT)
    assert script.facts() == {"failures": 0}
    assert script.end() == (0, "")
    assert not alive(pids)


def test_an_unhandled_exception_in_the_script_ends_the_engine() -> None:
    script = UserScript(GENERATE_FOR_EVER + "raise SystemExit(3)")
    pids = list(script.facts().values())
    assert script.end() == (3, "")
    assert not alive(pids)


def test_a_forked_process_does_not_keep_the_engine_alive() -> None:
    script = UserScript(
        """
client, inbox = client_for()
child = os.fork()
if child == 0:
    os.closerange(0, 3)
    time.sleep(60)
    os._exit(0)
say(core=client.info.pid, worker=client.info.worker_pids[0], child=child)
time.sleep(60)
"""
    )
    facts = script.facts()
    script.process.kill()
    script.process.wait()
    try:
        wait_until(lambda: not alive([facts["core"], facts["worker"]]), "engine core and worker gone")
        assert alive([facts["child"]])
    finally:
        os.kill(facts["child"], signal.SIGKILL)
    script.end()


def test_a_forked_process_that_ends_leaves_its_parents_engine_alone() -> None:
    script = UserScript(
        """
client, inbox = client_for()
from paper_worker import request
from stepahead import EngineDeadError
child = os.fork()
if child == 0:
    try:
        client.send(request(1))
    except EngineDeadError:
        client.close()
        sys.exit(17)
_, status = os.waitpid(child, 0)
client.send(request(2, max_tokens=3))
inbox.wait_for(lambda inbox: inbox.finished)
say(child=os.waitstatus_to_exitcode(status), tokens=len(inbox.tokens[2]))
"""
    )
    assert script.facts() == {"child": 17, "tokens": 3}
    code, errors = script.end()
    assert code == 0, errors


# ---- bytes that are no message ------------------------------------------------------------------


def test_frames_that_are_no_message_do_not_disturb_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "ENGINE_MAIN", "noisy_engine:main")
    client, inbox = client_for()
    inbox.wait_for(lambda inbox: inbox.finished)
    assert inbox.tokens[7] == [1, 2, 3]
    client.close()
    assert not inbox.failures


def test_the_socket_directory_is_gone_once_the_engine_runs() -> None:
    client, _ = client_for()
    assert os.listdir(os.environ["TMPDIR"]) == []
    client.close()


def test_a_long_temporary_directory_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    long = os.path.join(os.environ["TMPDIR"], "d" * 100)
    os.mkdir(long)
    monkeypatch.setattr("tempfile.tempdir", long)
    client, inbox = client_for()
    client.send(request(1, max_tokens=2))
    inbox.wait_for(lambda inbox: inbox.finished)
    client.close()
    assert os.listdir(long) == []
    os.rmdir(long)


def test_the_process_list_names_the_processes() -> None:
    client, _ = client_for()
    for pid, name in ((client.info.pid, "stepahead-engine-core"), (client.info.worker_pids[0], "stepahead-worker-0")):
        assert name in psutil.Process(pid).cmdline()
    client.close()
