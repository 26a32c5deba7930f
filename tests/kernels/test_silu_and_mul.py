import pytest
import torch

from stepahead.kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference, silu_and_mul_triton


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize(("tokens", "width"), [(1, 7), (3, 1024), (2, 1500), (0, 8)])
def test_kernel_equals_reference(device, dtype, tolerance, tokens, width):
    x = 3 * torch.randn(tokens, 2 * width, dtype=dtype, device=device)
    torch.testing.assert_close(silu_and_mul_triton(x), silu_and_mul_reference(x), rtol=tolerance, atol=tolerance)


def test_the_gate_is_the_first_half_and_the_input_stays():
    x = torch.randn(4, 12)
    kept = x.clone()
    gate, up = x[:, :6], x[:, 6:]
    torch.testing.assert_close(silu_and_mul(x), gate * torch.sigmoid(gate) * up)
    assert torch.equal(x, kept)
