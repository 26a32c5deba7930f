import pytest
import torch

from stepahead.kernels.rope import apply_rope, apply_rope_reference, apply_rope_triton


def table(positions: int, dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    angle = torch.arange(positions)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 16), (6, 2, 24), (9, 3, 64)])
def test_kernel_equals_reference_on_views_of_a_fused_projection(device, dtype, heads, kv_heads, dim):
    fused = torch.randn(5, heads + 2 * kv_heads, dim, dtype=dtype, device=device)
    expected = fused.clone()
    positions = torch.tensor([0, 1, 40, 7, 63], device=device)
    for rope, tensor in ((apply_rope_triton, fused), (apply_rope_reference, expected)):
        q, k, _ = tensor.split((heads, kv_heads, kv_heads), dim=1)
        rope(q, k, positions, table(64, dim, device))
    tolerance = 1e-6 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(fused, expected, rtol=tolerance, atol=tolerance)


def test_a_pair_is_rotated_by_the_angle_of_its_position():
    x = torch.randn(3, 2, 8)
    q, k = x.clone(), x[:, :1].clone()
    positions = torch.tensor([0, 5, 9])
    apply_rope(q, k, positions, table(10, 8))
    angle = positions[:, None, None] / 10000 ** (torch.arange(0, 8, 2) / 8)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(q, torch.cat((turned.real, turned.imag), dim=-1))
    torch.testing.assert_close(k, q[:, :1])
