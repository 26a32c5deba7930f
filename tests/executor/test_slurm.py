"""What the README says for SLURM, run as it stands there, with an srun that starts its tasks on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from external_workers import our_path
from launching import ASK, COMMAND, answer_of_one_process
from ports import port_below_the_ephemeral
from process_tools import nothing_left_behind
from stepahead.worker.link_key import write_key_file
from tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(100)

README = Path(__file__).parents[2] / "README.md"

SRUN = """
shift  # --cpus-per-task
tasks=""
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NODEID=$task SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_STEP_NUM_TASKS=2 \\
        SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_TASKS_PER_NODE='1(x2)' "$@" &
    tasks="$tasks $!"
done
code=0
for task in $tasks; do wait $task || code=$?; done
echo "tasks ended: $code" >&2
"""
"""Two nodes with a task each."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to run a batch script in, with the key, and the commands that it needs in its .venv."""
    commands = tmp_path / "bin"
    commands.mkdir()
    python = shlex.quote(sys.executable)
    scripts = {
        "srun": SRUN,
        "hostname": "echo 127.0.0.1",
        "python": f'exec {python} "$@"',
        "stepahead": f'exec {python} -c {shlex.quote(COMMAND)} "$@"',
    }
    for name, text in scripts.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"PATH={shlex.quote(str(commands))}:$PATH\n")
    write_key_file(tmp_path / "key")
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", our_path())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with nothing_left_behind(monkeypatch):
        yield tmp_path


def batch_script(model: str, ask: list[str]) -> str:
    """The README's, for this model and question, and two nodes with one task each."""
    section = README.read_text().partition("the whole of it is\n\n")[2]
    lines = re.match(r"(?:    .*\n)+", section)
    assert lines is not None, "where are the README's lines for SLURM?"
    script = textwrap.dedent(lines.group())
    for said, here in (
        (" --model M ", f" --model {shlex.quote(model)} --device cpu "),
        ("7777", str(port_below_the_ephemeral())),
        ("--tensor-parallel-size 8 ", "--tensor-parallel-size 1 "),
        ('--prompt "The sea is"', shlex.join(ask)),
    ):
        assert said in script
        script = script.replace(said, here)
    return script


def run_job(cluster: Path, script: str) -> subprocess.CompletedProcess[str]:
    """As SLURM does: the end of the script is the end of its tasks."""
    job = subprocess.Popen(
        ["bash", "-c", script], cwd=cluster, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
        env={**os.environ, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "1(x2)"},
    )  # fmt: skip
    try:
        job.wait(80)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has none left
            os.killpg(job.pid, signal.SIGKILL)
    output, errors = job.communicate()
    return subprocess.CompletedProcess(job.args, job.returncode, output, errors)


def test_the_readmes_batch_script_for_slurm_gives_the_tokens_of_one_process(cluster: Path) -> None:
    model = str(make_tiny_model("LlamaForCausalLM", cluster / "model"))
    ask = [*ASK, "--max-tokens", "12", "--json"]
    done = run_job(cluster, batch_script(model, [*ask, "--log-level", "info"]))
    assert done.returncode == 0, done.stderr
    assert "tasks ended: 0" in done.stderr, done.stderr
    assert json.loads(done.stdout.splitlines()[0]) == json.loads(answer_of_one_process(model, *ask).splitlines()[0])
    assert {f"rank {rank} has come" in done.stderr for rank in (0, 1)} == {True}


def test_the_job_ends_with_the_engines_exit_code_when_that_is_refused(cluster: Path) -> None:
    done = run_job(cluster, batch_script(str(cluster / "nothing"), ASK))
    assert done.returncode == 2, done.stderr
    assert "stepahead: error: " in done.stderr
