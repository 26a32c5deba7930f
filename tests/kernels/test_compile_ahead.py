import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stepahead.kernels

ARCHITECTURES = (80, 90, 100)
KERNELS = sorted(
    name
    for file in Path(stepahead.kernels.__path__[0]).glob("*.py")
    for name in re.findall(r"^def (_\w+_kernel)\(", file.read_text(), re.MULTILINE)
)
SHARED_MEMORY_OF_A_CONSUMER_GPU = 99 * 1024

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request, tmp_path_factory) -> list[dict]:
    """Every launch that compile_ahead.py knows, compiled for one architecture."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_ahead.py")), str(request.param)],
        capture_output=True, text=True, timeout=110, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_compiles_and_fits_shared_memory(compiled, kernel):
    launches = [launch for launch in compiled if launch["kernel"] == kernel]
    assert launches, "no case of compile_ahead.py launches it"
    for launch in launches:
        assert not launch["error"], f"{launch['case']}: {launch['error']}"
        assert launch["shared"] <= SHARED_MEMORY_OF_A_CONSUMER_GPU, launch
