import pytest
import torch

from stepahead.kernels.kv_write import kv_write_reference, kv_write_triton


@pytest.mark.parametrize("write", [kv_write_reference, kv_write_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("places", [[0, 17, 63, 5], [-1, 8, -1, 62], [-1, -1, -1, -1], []])
def test_each_token_lands_in_its_place_and_nothing_else_changes(device, write, dtype, places):
    if write is kv_write_reference:
        device = "cpu"
    fused = torch.randn(len(places), 8, 20, dtype=dtype, device=device)
    k, v = fused[:, 2:5], fused[:, 5:]
    k_cache, v_cache = torch.randn(2, 4, 16, 3, 20, dtype=dtype, device=device)
    expected = k_cache.clone(), v_cache.clone()
    for token, place in enumerate(places):
        if place >= 0:
            expected[0][place // 16, place % 16] = k[token]
            expected[1][place // 16, place % 16] = v[token]
    write(k, v, k_cache, v_cache, torch.tensor(places, dtype=torch.int64, device=device))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])
