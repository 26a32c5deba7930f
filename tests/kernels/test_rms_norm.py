import pytest
import torch

from stepahead.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 3e-3}
"""The interpreter cuts a bfloat16 off where hardware rounds."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 8), (5, 48), (3, 2, 100), (0, 16)])
def test_kernel_equals_reference(device, dtype, shape):
    x, residual = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(shape[-1], dtype=dtype, device=device)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), **close)
    for ours, theirs in zip(
        add_rms_norm_triton(x, residual, weight, 1e-5), add_rms_norm_reference(x, residual, weight, 1e-5), strict=True
    ):
        torch.testing.assert_close(ours, theirs, **close)


def test_kernel_reads_heads_inside_a_fused_projection(device):
    heads = torch.randn(4, 9, 24, device=device)[:, 2:5]
    weight = torch.randn(24, device=device)
    torch.testing.assert_close(rms_norm_triton(heads, weight, 1e-6), rms_norm_reference(heads, weight, 1e-6))


def test_result_is_that_of_the_formula():
    x, weight = torch.randn(6, 32), torch.randn(32)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_adding_returns_the_sum_and_changes_no_input():
    x, residual, weight = torch.randn(6, 32), torch.randn(6, 32), torch.randn(32)
    kept = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_low_precision_is_normalised_in_float32():
    x = torch.full((1, 4096), 200.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-5), torch.ones_like(x))
