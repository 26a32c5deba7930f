from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The demo model's folder, fetched on first use."""
    script = Path(__file__).parents[1] / "scripts" / "fetch_demo_model.py"
    done = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return done.stdout.strip()
