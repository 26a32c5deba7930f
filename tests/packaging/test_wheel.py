"""The built wheel works by itself: in an empty environment, outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
SUBPACKAGES = ("frontend", "engine_core", "executor", "worker", "worker/models", "kernels")


def run(*command: object, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=570
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    run("git", "clone", "--quiet", ROOT, source, cwd=folder)
    changed = run("git", "ls-files", "--modified", "--others", "--exclude-standard", "--deduplicate", cwd=ROOT)
    for name in changed.splitlines():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
        else:
            target.unlink()
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source, cwd=folder)
    return next(folder.glob("stepahead-*.whl"))


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = [ROOT / name for name in ("__init__.py", "config.py", "errors.py", "py.typed")]
    for package in SUBPACKAGES:
        sources += (ROOT / package).glob("*.py")
    assert names == {f"stepahead/{path.relative_to(ROOT).as_posix()}" for path in sources}


@pytest.mark.timeout(600)
def test_the_wheel_generates_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    model = make_tiny_model("LlamaForCausalLM", tmp_path / "model", tokenizer=True)
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    bin_folder = tmp_path / "env" / "bin"
    run(bin_folder / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    command = ("generate", "--model", model, "--prompt", "The sea", "--max-tokens", 4, "--ignore-eos", "--json")
    answer, summary = map(json.loads, run(bin_folder / "stepahead", *command, cwd=tmp_path).splitlines())
    assert len(answer["token_ids"]) == 4
    assert summary["async_scheduling"] is True
