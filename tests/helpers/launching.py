"""scripts/launch.py as a process, and the ranks below it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

SCRIPT = Path(__file__).parents[2] / "scripts" / "launch.py"
ASK = ["--skip-tokenizer-init", "--prompt-token-ids", "5,6,7", "--temperature", "0"]
COMMAND = "import sys; from stepahead.frontend.cli import main; sys.exit(main())"
"""`stepahead`, for python -c."""


def launch(model: str, *arguments: str, **popen: Any) -> subprocess.Popen[str]:
    """popen: stderr=FILE, say, where it is to be read meanwhile."""
    command = [sys.executable, str(SCRIPT), "--model", model, "--device", "cpu", *arguments]
    return subprocess.Popen(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **popen})


def answer_of_one_process(model: str, *ask: str) -> str:
    """What `stepahead generate` prints."""
    command = [sys.executable, "-c", COMMAND, "generate", "--model", model, "--device", "cpu", "--executor", "uni"]
    return subprocess.run([*command, *ask], check=True, capture_output=True, text=True, cwd="/tmp").stdout


def family_of(process: subprocess.Popen[str]) -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def workers_of(process: subprocess.Popen[str], count: int) -> list[int]:
    """In the order of their ranks."""

    def found() -> list[int]:
        children = psutil.Process(process.pid).children(recursive=True)
        return [
            c.pid for c in children if "stepahead.worker" in c.cmdline() and "torch.distributed.run" not in c.cmdline()
        ]

    deadline = time.monotonic() + 40
    while len(pids := found()) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return pids
