"""Whoever gives up on a start does not wait for what runs beside it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from hash_model import write_hash_model
from stepahead.frontend import engine_setup

SCRIPT = """
import sys, time
from stepahead.frontend import engine_setup

def load(folder):
    print("loading", flush=True)
    for _ in range(10_000):  # as an import does: much in little pieces
        time.sleep(0.01)

engine_setup.load_tokenizer = load
engine_setup._TokenizerLoad("folder")
print("given up", flush=True)
time.sleep(0.2)
"""


class GivenUp(BaseException):
    """As KeyboardInterrupt is."""


def test_an_interrupted_start_does_not_wait_for_the_tokenizer(tmp_path, monkeypatch):
    go_on = threading.Event()

    def interrupted(config, on_message):
        raise GivenUp

    monkeypatch.setattr(engine_setup, "load_tokenizer", lambda folder: go_on.wait(20))
    monkeypatch.setattr(engine_setup, "EngineClient", interrupted)
    start = time.monotonic()
    with pytest.raises(GivenUp):
        engine_setup.start_engine(write_hash_model(tmp_path / "hash"), {}, print)
    assert time.monotonic() - start < 5
    go_on.set()


def test_the_end_of_the_interpreter_breaks_the_tokenizers_import_off():
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30)
    assert time.monotonic() - start < 10
    assert (result.returncode, result.stderr) == (0, "")
    assert "given up" in result.stdout
