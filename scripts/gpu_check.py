#!/usr/bin/env python3
"""Runs the sections of the GPU check one after another, each in a process of its own with a time limit.

See gpu_check.sh. Writes gpu_check.json, gpu_check.log and pictures into the output folder. A section's process
(gpu_sections.py, a benchmark, pytest) prints its results on lines "RESULT {…}" as it gets them, so that a section that
is too slow still says what it has; without any such line the last line that is a JSON object is its result.
Needs only Python's library itself: that torch or a package is missing is a finding, not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
TOTAL_SECONDS = 460
_END_GRACE = 3.0


@dataclass(frozen=True)
class Section:
    """command: run in the work folder. seconds: its limit. needs: a file without which it is missing."""

    name: str
    command: list[str]
    seconds: float
    needs: Path | None = None
    env: dict[str, str] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, (out / "gpu_check.log").open("w") as log:
        work = Path(folder)
        (work / "stepahead").symlink_to(ROOT)
        report: dict[str, Any] = {"options": vars(options), "wheels": install_wheels(options.wheels, work, log)}
        environment = _environment(work, options.quick)
        report["sections"] = {}
        for section in sections(options, out):
            if options.only and section.name not in options.only:
                continue
            left = options.seconds - (time.monotonic() - begin)
            print(f"gpu_check: {section.name} …", end=" ", file=sys.stderr, flush=True)
            result = run_section(section, left, work, environment, log)
            report["sections"][section.name] = result
            print(f"{result['status']} ({result['seconds']} s) {result.get('why', '')}", file=sys.stderr, flush=True)
            _write(out, report, begin)
    _write(out, report, begin)
    print(json.dumps(report))
    return 0


def sections(options: argparse.Namespace, out: Path) -> Iterator[Section]:
    """In the order of what one wants to know first; the tests of the kernels take what time is left."""
    mode = ["--device", options.device, *(["--quick"] if options.quick else [])]

    def own(name: str, seconds: float, **env: str) -> Section:
        command = [sys.executable, "-B", str(SCRIPTS / "gpu_sections.py"), name, *mode]
        return Section(name, command, seconds, env=env)

    yield own("machine", 60)
    yield own("kernels", 120)
    yield own("async_equals_sync", 90)
    yield own("no_host_sync", 60, STEPAHEAD_SYNC_CHECK="error")
    yield own("parity", 90)
    yield own("decode_qwen3_0.6b", 90)
    yield own("decode_llama3.1_8b", 110)
    overlap = SCRIPTS / "bench_overlap.py"
    sizes = ["--requests", "8", "--steps", "40", "--rounds", "1"] if options.quick else ["--requests", "64"]
    command = [sys.executable, "-B", str(overlap), "--step-ms", "5", *sizes, "--device", options.device, "--json"]
    yield Section("bench_overlap", command, 60, needs=overlap)
    yield Section("trace", [*own("trace", 0).command, "--out", str(out)], 60)
    yield Section("kernel_tests", _pytest(options.quick), 300)


def _pytest(quick: bool) -> list[str]:
    # Our settings want plugins that may not be there; the cache would be written into the checkout.
    command = [sys.executable, "-B", "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    tests = ROOT / "tests" / "kernels"
    return [*command, str(tests / "test_silu_and_mul.py" if quick else tests)]


def run_section(section: Section, left: float, work: Path, environment: dict[str, str], log: Any) -> dict[str, Any]:
    """Its results, with "status" (ok, failed, missing, timeout or skipped), "seconds", and why it is not ok."""
    if section.needs is not None and not section.needs.exists():
        return {"status": "missing", "seconds": 0, "why": f"{section.needs} is not there"}
    if left < _END_GRACE + 2:
        return {"status": "skipped", "seconds": 0, "why": "no time was left"}
    print(f"\n===== {section.name}: {' '.join(section.command)}", file=log, flush=True)
    begin = time.monotonic()
    code, text = _run(section, min(section.seconds, left - _END_GRACE), work, environment, log)
    seconds = round(time.monotonic() - begin, 1)
    result = _counts(text) if section.name == "kernel_tests" else _results(text)
    status = {"status": "timeout" if code is None else "ok" if code == 0 else "failed", "seconds": seconds}
    if code is None:
        status["why"] = f"not done after {seconds} s; what it had is here"
    elif code != 0:
        status["why"] = _reason(text, code)
        status["status"] = "missing" if "No module named" in status["why"] else "failed"
    elif result.get("ok") is False:
        status["status"] = "failed"
    return {**status, **result}


def _run(section: Section, seconds: float, work: Path, environment: dict[str, str], log: Any) -> tuple[int | None, str]:
    """(exit code, None when it took too long; what it printed). Its children end with it."""
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            section.command, cwd=work, env={**environment, **section.env}, stdin=subprocess.DEVNULL,
            stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            _end(process)
        printed.seek(0)
        text = printed.read()
    log.write(text)
    log.flush()
    return code, text


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole process group: an engine has processes of its own."""
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_GRACE)
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _results(text: str) -> dict[str, Any]:
    lines = text.splitlines()
    results: dict[str, Any] = {}
    for line in lines:
        if line.startswith("RESULT "):
            results.update(json.loads(line[len("RESULT ") :]))
    if results:
        return results
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return {}


def _counts(text: str) -> dict[str, Any]:
    """pytest's verdicts so far, and which tests failed."""
    verdicts = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)", text, re.MULTILINE)
    counts: dict[str, Any] = {kind.lower(): 0 for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    for _, kind in verdicts:
        counts[kind.lower()] += 1
    return {**counts, "failures": [name for name, kind in verdicts if kind in ("FAILED", "ERROR")][:50]}


def _reason(text: str, code: int) -> str:
    """The last line that names an error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b|.*No module named", line)]
    return f"exit code {code}: {(errors or lines or ['it printed nothing'])[-1][:500]}"


def install_wheels(wheels: str | None, work: Path, log: Any) -> dict[str, str]:
    """Puts the wheels of what Python lacks into the work folder. Returns by wheel what became of it."""
    folder = Path(wheels) if wheels else ROOT / ".whl"
    done: dict[str, str] = {}
    for wheel in sorted(folder.glob("*.whl")):
        name = wheel.name.split("-")[0]
        try:
            done[wheel.name] = f"not needed: {name} {importlib.metadata.version(name)} is installed"
            continue
        except importlib.metadata.PackageNotFoundError:
            pass
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check"]
        pip = subprocess.run(
            [*command, "--quiet", "--target", str(work / "packages"), str(wheel)], capture_output=True, text=True
        )
        log.write(pip.stdout + pip.stderr)
        done[wheel.name] = "installed" if pip.returncode == 0 else f"failed: {pip.stderr.strip()[-300:]}"
    return done


def _environment(work: Path, quick: bool) -> dict[str, str]:
    path = [str(work), str(ROOT / "tests" / "helpers"), str(work / "packages"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        **({"OMP_NUM_THREADS": "1"} if quick else {}),
    }


def _write(out: Path, report: dict[str, Any], begin: float) -> None:
    report["seconds"] = round(time.monotonic() - begin, 1)
    report["ok"] = all(result["status"] == "ok" for result in report.get("sections", {}).values())
    (out / "gpu_check.json").write_text(json.dumps(report, indent=2))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "out" / "gpu_check"), help="default: out/gpu_check")
    parser.add_argument("--wheels", help="a folder of wheels; default: .whl in the checkout")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that the check itself works")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="run these sections only")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help=f"in all; default: {TOTAL_SECONDS}")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
