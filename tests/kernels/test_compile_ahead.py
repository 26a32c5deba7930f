import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ARCHITECTURES = (80, 90, 100)
KERNELS = (
    "_rms_norm_kernel", "_rope_kernel", "_silu_and_mul_kernel", "_kv_write_kernel", "_decode_kernel", "_merge_kernel",
    "_prefill_kernel", "_prepare_inputs_kernel", "_combine_kernel", "_post_update_kernel", "_staged_write_kernel",
    "_block_best_kernel", "_row_best_kernel",
)  # fmt: skip
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
    assert launches
    for launch in launches:
        assert not launch["error"], f"{launch['case']}: {launch['error']}"
        assert launch["shared"] <= SHARED_MEMORY_OF_A_CONSUMER_GPU, launch


def test_no_kernel_is_missing_from_this_file(compiled):
    assert {launch["kernel"] for launch in compiled} == set(KERNELS)
