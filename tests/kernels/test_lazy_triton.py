import os
import subprocess
import sys
import textwrap

import pytest

OPERATIONS = """
    import torch
    from stepahead.kernels.gumbel_sample import gumbel_sample
    from stepahead.kernels.paged_attention import paged_attention
    from stepahead.kernels.rms_norm import rms_norm

    rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5)
    row = torch.zeros(1, dtype=torch.int64)
    gumbel_sample(torch.zeros(1, 10), torch.ones(1), row, row)
    q, cache = torch.ones(1, 2, 16), torch.ones(1, 16, 1, 16)
    start = torch.tensor([0, 1], dtype=torch.int32)
    paged_attention(q, cache, cache, start[:1, None], start, start[1:], 1.0, 1, 1)
"""


def run(code: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, env=environment
    )


def test_operations_on_cpu_tensors_never_import_triton():
    result = run(OPERATIONS + "\n    import sys\n    print('triton' in sys.modules)")
    assert result.stdout.split() == ["False"], result.stderr


def test_operations_work_where_triton_is_not_installed():
    result = run("\n    import sys\n    sys.modules['triton'] = None" + OPERATIONS)
    assert result.returncode == 0, result.stderr


def test_loading_one_kernel_makes_every_kernel_of_its_module_a_triton_function(device):
    from stepahead.kernels import gumbel_sample
    from stepahead.kernels._triton import LazyKernel

    loaded = gumbel_sample._block_best_kernel
    if isinstance(loaded, LazyKernel):
        loaded = loaded.load()
    assert loaded is gumbel_sample._block_best_kernel
    assert not any(isinstance(value, LazyKernel) for value in vars(gumbel_sample).values())


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power_of_2_is_the_smallest_one_not_below(n, power):
    from stepahead.kernels._triton import next_power_of_2

    assert next_power_of_2(n) == power
