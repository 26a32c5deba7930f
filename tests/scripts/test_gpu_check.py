"""The GPU check works where there is no GPU, at tiny sizes, and nothing that goes wrong in it stops it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


gpu_check = load_script("gpu_check")


def run(code: str, tmp_path: Path, seconds: float = 30, left: float = 60, name: str = "probe") -> dict:
    section = gpu_check.Section(name, [sys.executable, "-c", code], seconds)
    with (tmp_path / "log").open("a") as log:
        return gpu_check.run_section(section, left, tmp_path, dict(os.environ), log)


@pytest.mark.timeout(600)
def test_every_section_of_our_own_works_on_a_cpu(tmp_path: Path) -> None:
    names = ["machine", "async_equals_sync", "no_host_sync", "decode_qwen3_0.6b"]
    command = ["bash", SCRIPTS / "gpu_check.sh", "--device", "cpu", "--quick", "--out", tmp_path / "out"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in [*command, "--only", *names]], env={**environment, "PYTHON": sys.executable},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert {name: result["status"] for name, result in report["sections"].items()} == dict.fromkeys(names, "ok")
    assert report["ok"]
    sections = report["sections"]
    assert sections["async_equals_sync"]["uni async"]["preemptions"] > 0
    assert sections["decode_qwen3_0.6b"]["batch 2"]["tok_s"] > 0
    assert "===== no_host_sync" in (tmp_path / "out" / "gpu_check.log").read_text()


def test_a_section_that_takes_too_long_is_ended_with_its_children_and_keeps_what_it_had(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print('RESULT {\"child\": %d}' % child.pid, flush=True); time.sleep(60)"
    )
    result = run(code, tmp_path, seconds=2)
    assert result["status"] == "timeout"
    deadline = time.monotonic() + 10
    while Path(f"/proc/{result['child']}/status").exists() and time.monotonic() < deadline:
        if "State:\tZ" in Path(f"/proc/{result['child']}/status").read_text():
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{result['child']}").exists()


def test_a_section_that_fails_says_why(tmp_path: Path) -> None:
    result = run("print('RESULT {\"a\": 1}'); raise ValueError('no such kernel')", tmp_path)
    assert (result["status"], result["a"]) == ("failed", 1)
    assert "ValueError: no such kernel" in result["why"]


def test_a_package_that_is_not_there_is_missing_not_a_failure(tmp_path: Path) -> None:
    result = run("import no_such_package_at_all", tmp_path)
    assert result["status"] == "missing"
    assert "No module named 'no_such_package_at_all'" in result["why"]


def test_a_section_that_finds_a_fault_has_failed(tmp_path: Path) -> None:
    assert run("print('RESULT {\"ok\": false}')", tmp_path)["status"] == "failed"


def test_a_benchmarks_last_json_document_is_its_result(tmp_path: Path) -> None:
    result = run("print('5 ms'); print('{\"results\": [1]}')", tmp_path)
    assert (result["status"], result["results"]) == ("ok", [1])


def test_a_script_that_is_not_there_is_missing(tmp_path: Path) -> None:
    section = gpu_check.Section("bench", ["false"], 9, needs=tmp_path / "bench.py")
    result = gpu_check.run_section(section, 60, tmp_path, {}, None)
    assert (result["status"], result["why"]) == ("missing", f"{tmp_path / 'bench.py'} is not there")


def test_without_time_left_a_section_is_skipped(tmp_path: Path) -> None:
    assert run("print(1)", tmp_path, left=1)["status"] == "skipped"


def test_tests_are_counted_also_when_they_do_not_end(tmp_path: Path) -> None:
    code = (
        "print('a.py::test_x PASSED [ 1%]'); print('a.py::test_y[1 2] FAILED [ 2%]', flush=True);"
        "import time; time.sleep(60)"
    )
    result = run(code, tmp_path, seconds=1, name="kernel_tests")
    assert (result["status"], result["passed"], result["failures"]) == ("timeout", 1, ["a.py::test_y[1 2]"])


def test_wheels_of_what_python_lacks_are_installed_and_others_left(tmp_path: Path) -> None:
    wheels, work = tmp_path / "wheels", tmp_path / "work"
    wheels.mkdir()
    work.mkdir()
    for name in ("carried_along", "msgspec"):
        with zipfile.ZipFile(wheels / f"{name}-9.9-py3-none-any.whl", "w") as wheel:
            info = f"{name}-9.9.dist-info"
            wheel.writestr(f"{name}.py", "X = 1\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    (wheels / "broken-1.0-py3-none-any.whl").write_bytes(b"no zip file")
    with (tmp_path / "log").open("w") as log:
        done = gpu_check.install_wheels(str(wheels), work, log)
    assert done["carried_along-9.9-py3-none-any.whl"] == "installed"
    assert done["msgspec-9.9-py3-none-any.whl"].startswith("not needed: msgspec")
    assert done["broken-1.0-py3-none-any.whl"].startswith("failed")
    assert [path.name for path in (work / "packages").glob("*.py")] == ["carried_along.py"]
