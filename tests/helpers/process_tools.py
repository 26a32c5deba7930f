"""What process tests share: who is alive, what lies in the temporary directory, a user's script as a process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import stepahead

DEADLINE = 15.0
"""Seconds after which something that should have happened has not."""

SHARED_MEMORY = Path("/dev/shm")


def wait_until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} seconds: {what}"
        time.sleep(0.01)


def alive(pids: Sequence[int]) -> list[int]:
    """Zombies do not count: they wait for a parent that may be the test."""
    result = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                result.append(pid)
    return result


@contextlib.contextmanager
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the test no descendant of this process runs that did not before, and neither the temporary directory
    (a fresh one, short enough for socket paths; torch's own cache apart) nor /dev/shm holds anything new."""
    home = tempfile.mkdtemp(prefix="t-", dir="/tmp")
    monkeypatch.setenv("TMPDIR", home)
    monkeypatch.setattr(tempfile, "tempdir", home)
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    shared = set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.exists() else set()
    try:
        yield
        wait_until(
            lambda: not alive([c.pid for c in psutil.Process().children(recursive=True) if c.pid not in children]),
            "all processes gone",
        )
        wait_until(lambda: not _ours(home), "all socket directories gone")
        if SHARED_MEMORY.exists():  # other tests that run meanwhile may hold some for a moment
            wait_until(lambda: set(os.listdir(SHARED_MEMORY)) <= shared, "all shared memory gone")
    finally:
        shutil.rmtree(home)


def _ours(home: str) -> list[str]:
    return [name for name in os.listdir(home) if not name.startswith("torchinductor_")]


class UserScript:
    """A user's program in a process (group) of its own. Its first line of output is JSON: what `say` was given."""

    PRELUDE = """
import json, os, sys, threading, time
from paper_worker import client_for
def say(**facts):
    print(json.dumps(facts), flush=True)
"""

    def __init__(self, text: str) -> None:
        package_home = str(Path(stepahead.__file__).parent.parent)
        path = os.pathsep.join([package_home, str(Path(__file__).parent)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PRELUDE + text],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def facts(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=DEADLINE)[1]
        return json.loads(line)

    def end(self) -> tuple[int, str]:
        """Waits for it. Returns the exit code and what it wrote to standard error."""
        _, errors = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, errors
