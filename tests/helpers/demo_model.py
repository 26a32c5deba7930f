"""The demo model's folder, fetched into the user's cache when it is not there yet."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_demo_model.py"


@cache
def fetch_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_demo_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def demo_model() -> str:
    script = fetch_script()
    return str(script.fetch(script.cache_dir()))
