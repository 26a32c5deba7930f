import os
import subprocess
import sys
import textwrap

import pytest
import torch

from stepahead.kernels import _numba
from stepahead.kernels.kv_write import kv_write, kv_write_numba, kv_write_reference
from stepahead.kernels.rms_norm import (
    add_rms_norm_numba,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_numba,
    rms_norm_reference,
)
from stepahead.kernels.rope import apply_rope_numba, apply_rope_reference
from stepahead.kernels.silu_and_mul import silu_and_mul, silu_and_mul_numba, silu_and_mul_reference

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.01}
# More rows than one thread takes, so that the work is divided.
ROWS = [0, 1, 3, 70]


@pytest.fixture(autouse=True)
def _numba_installed() -> None:
    pytest.importorskip("numba")


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[ours.dtype], atol=TOLERANCE[ours.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [16, 48, 576])
def test_silu_and_mul_equals_the_reference(dtype, rows, width):
    x = 3 * torch.randn(rows, 2 * width + 32, dtype=dtype)[:, : 2 * width]
    close(silu_and_mul_numba(x), silu_and_mul_reference(x))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_holds_from_one_end_of_the_numbers_to_the_other(dtype):
    gate = torch.tensor([-torch.inf, -3e38, -200, -88, -87, -20, -1e-3, 0, 1e-30, 1, 20, 87, 88, 200, 3e38, torch.nan])
    x = torch.cat((gate, torch.ones(16))).to(dtype).unsqueeze(0)
    ours = silu_and_mul_numba(x)
    # torch gives NaN for -inf, by its own formula -inf * 0; the limit is 0.
    expected = silu_and_mul_reference(x)
    torch.testing.assert_close(ours[:, 1:], expected[:, 1:], rtol=1e-2, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (5, 48), (70, 576), (3, 2, 128)])
def test_rms_norm_equals_the_reference(dtype, shape):
    x, residual = torch.randn(2, *shape, dtype=dtype)
    weight = torch.randn(shape[-1], dtype=dtype)
    close(rms_norm_numba(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    for ours, theirs in zip(
        add_rms_norm_numba(x, residual, weight, 1e-5), add_rms_norm_reference(x, residual, weight, 1e-5), strict=True
    ):
        close(ours, theirs)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm_reads_heads_inside_a_fused_projection(dtype):
    heads = torch.randn(4, 9, 32, dtype=dtype)[:, 2:5]
    weight = torch.randn(32, dtype=dtype)
    close(rms_norm_numba(heads, weight, 1e-6), rms_norm_reference(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 32), (6, 2, 96), (9, 3, 64)])
def test_rope_equals_the_reference_on_views_of_a_fused_projection(dtype, heads, kv_heads, dim):
    fused = torch.randn(40, heads + 2 * kv_heads, dim, dtype=dtype)
    expected = fused.clone()
    positions, cos_sin = torch.randint(0, 64, (40,)), torch.randn(64, dim)
    for rope, tensor in ((apply_rope_numba, fused), (apply_rope_reference, expected)):
        q, k, _ = tensor.split((heads, kv_heads, kv_heads), dim=1)
        rope(q, k, positions, cos_sin)
    close(fused, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kv_write_writes_exactly_what_the_reference_does(dtype):
    fused = torch.randn(40, 8, 32, dtype=dtype)
    k, v = fused[:, 2:5], fused[:, 5:]
    caches = [torch.randn(2, 4, 16, 3, 32, dtype=dtype)] * 2
    ours, theirs = (cache.clone() for cache in caches)
    places = torch.randperm(64)[:40]
    places[::7] = -1
    kv_write_numba(k, v, *ours, places)
    kv_write_reference(k, v, *theirs, places)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_a_kernel_computes_does_not_depend_on_the_number_of_threads(dtype):
    x, weight = torch.randn(200, 576, dtype=dtype), torch.randn(576, dtype=dtype)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(rms_norm_numba(x, weight, 1e-5))
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_bfloat16_is_rounded_to_the_nearest_ties_to_even():
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(-1, 16)
    x = torch.where(x.isfinite(), x, torch.zeros_like(x))
    ours, theirs = silu_and_mul_numba(torch.cat((x, x), 1)), silu_and_mul_reference(torch.cat((x, x), 1))
    same = ours.view(torch.int16) == theirs.view(torch.int16)
    assert same.float().mean() > 0.99


@pytest.mark.parametrize(
    ("x", "taken"),
    [
        (torch.ones(2, 32), True),
        (torch.ones(2, 32, dtype=torch.bfloat16), True),
        (torch.ones(2, 32, dtype=torch.float16), False),
        (torch.ones(2, 40), False),
        (torch.ones(2, 32, device="meta"), False),
    ],
)
def test_a_tensor_that_no_kernel_takes_goes_to_the_reference(x, taken):
    assert _numba.runs_in_numba(x, x.shape[1]) is taken


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100)


def test_operations_work_where_numba_is_not_installed():
    result = run("""
        import sys
        sys.modules["numba"] = None
        import torch
        from stepahead.kernels.silu_and_mul import silu_and_mul
        print(silu_and_mul(torch.ones(2, 32)).shape)
    """)
    assert "16" in result.stdout, result.stderr


def test_importing_the_operations_imports_no_numba():
    result = run("import sys, stepahead.kernels.paged_attention as _; print('numba' in sys.modules)")
    assert result.stdout.split() == ["False"], result.stderr


def test_operations_choose_numba_for_cpu_tensors(monkeypatch):
    calls = []
    monkeypatch.setattr(_numba.NumbaKernel, "launch", lambda self, *rest: calls.append(self.function.__name__))
    x = torch.ones(2, 32)
    silu_and_mul(x)
    rms_norm(x, torch.ones(32), 1e-5)
    kv_write(x.unsqueeze(1), x.unsqueeze(1), x, x, torch.tensor([0, 1]))
    assert calls == ["_silu_and_mul_loop", "_rms_norm_loop", "_kv_write_loop"]


def test_a_kernel_runs_on_one_thread_where_there_is_no_openmp_to_share(monkeypatch):
    monkeypatch.setattr(_numba, "_fork_join", lambda: None)
    x = torch.randn(200, 1152)
    close(silu_and_mul_numba(x), silu_and_mul_reference(x))


def test_a_part_of_a_kernel_cannot_be_called_from_outside():
    with pytest.raises(TypeError, match="only be called by a kernel"):
        _numba.NumbaFunction(os.getcwd)()
