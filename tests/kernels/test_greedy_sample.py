import pytest
import torch

from stepahead.kernels.greedy_sample import greedy_sample, greedy_sample_numba, greedy_sample_reference


@pytest.fixture(params=[greedy_sample_numba, greedy_sample_reference])
def sample(request):
    if request.param is greedy_sample_numba:
        pytest.importorskip("numba")
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "vocab"), [(0, 32), (1, 16), (3, 240), (5, 256), (40, 1040)])
def test_numba_equals_the_reference(dtype, n, vocab):
    pytest.importorskip("numba")
    # bfloat16 has 8 bits: many logits of a row are equal.
    logits = torch.randn(n, vocab).to(dtype)
    assert torch.equal(greedy_sample_numba(logits), greedy_sample_reference(logits))


def test_every_place_can_be_the_maximum(sample):
    logits = torch.eye(528) - 3
    assert sample(logits).tolist() == list(range(528))


@pytest.mark.parametrize("low", [-torch.inf, -1e30, 0.0])
def test_the_first_of_equal_maxima_is_taken(sample, low):
    logits = torch.full((3, 512), low)
    logits[0, [300, 301, 511]] = 2.0
    logits[1, [17, 270]] = 2.0
    assert sample(logits).tolist() == [300, 17, 0]


def test_rows_of_any_length_and_type_are_taken():
    assert greedy_sample(torch.eye(7, dtype=torch.float16)).tolist() == list(range(7))


@pytest.mark.parametrize("rows", [slice(None), slice(0, 16), slice(300, 301), slice(512, 528)])
def test_rows_with_nan_give_some_token(sample, rows):
    logits = torch.randn(3, 528)
    logits[1, rows] = torch.nan
    tokens = sample(logits)
    assert tokens[0] == logits[0].argmax()
    assert 0 <= tokens[1] < 528
    assert tokens[2] == logits[2].argmax()
