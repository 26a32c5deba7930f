import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepahead.kernels.top_k_top_p import mask_top_k_top_p_min_p


def kept(logits: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    masked = mask_top_k_top_p_min_p(
        torch.tensor([logits]), torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.tensor([min_p])
    )
    return [token for token, value in enumerate(masked[0].tolist()) if value > -math.inf]


def slowly_kept(logits: list[float], top_k: int, top_p: float, min_p: float) -> tuple[set[int], set[int]]:
    """(tokens surely kept, tokens possibly kept): they differ where rounding may decide."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = [token for token in order[: top_k or len(logits)] if logits[token] > -math.inf]
    weights = {token: math.exp(logits[token] - logits[order[0]]) for token in order}
    kept_for = {}
    for slack in (-1e-5, 1e-5):
        # A looser min-p leaves more for top-p to share among, so both ends of the rounding are tried for both.
        kept_for[slack] = [
            nucleus(order, weights, top_p + slack, min_p * (1 - other))
            if top_p < 1.0
            else {token for token in order if weights[token] >= min_p * (1 - other)}
            for other in (-1e-5, 1e-5)
        ]
    return set.intersection(*kept_for[-1e-5]) | {order[0]}, set.union(*kept_for[1e-5]) | {order[0]}


def nucleus(order: list[int], weights: dict[int, float], top_p: float, min_p: float) -> set[int]:
    likely = [token for token in order if weights[token] >= min_p]
    total, before, kept_tokens = sum(weights[token] for token in likely), 0.0, set()
    for token in likely:
        if before / total < top_p:
            kept_tokens.add(token)
        before += weights[token]
    return kept_tokens


LOGIT = st.one_of(st.floats(-20, 20, width=32), st.integers(-3, 3).map(float), st.just(-math.inf))


@given(
    logits=st.lists(LOGIT, min_size=1, max_size=12).filter(lambda row: max(row) > -math.inf),
    top_k=st.integers(0, 13),
    top_p=st.one_of(st.just(1.0), st.integers(1, 100).map(lambda percent: percent / 100)),
    min_p=st.one_of(st.just(0.0), st.integers(0, 100).map(lambda percent: percent / 100)),
)
def test_kept_tokens_are_those_of_the_definition(logits, top_k, top_p, min_p):
    sure, possible = slowly_kept(logits, top_k, top_p, min_p)
    assert sure <= set(kept(logits, top_k, top_p, min_p)) <= possible


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [1]),
        ({"top_p": 0.51}, [1, 3]),
        ({"top_p": 1e-6}, [1]),
        ({"min_p": 0.4}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.6}, [1]),  # 0.5 of 0.8 is 0.625 of what top-k left
        ({"top_k": 3, "min_p": 0.35, "top_p": 0.9}, [1, 3]),
        ({"min_p": 0.45, "top_p": 0.6}, [1]),  # top-p shares among what min-p left: 0.5 of 0.8
    ],
)
def test_each_limit_and_their_order(limits, tokens):
    logits = [math.log(p) for p in (0.15, 0.5, 0.05, 0.3)]
    assert kept(logits, **limits) == tokens


def test_equal_logits_are_cut_by_id():
    assert kept([1.0, 2.0, 2.0, 2.0], top_k=2) == [1, 2]


def test_top_p_1_keeps_even_what_rounding_hides():
    assert len(kept([0.0] + [-30.0] * 1000)) == 1001


def test_a_row_without_any_allowed_token_stays_so():
    assert kept([-math.inf] * 3, top_k=1, top_p=0.5, min_p=0.5) == []


def test_rows_have_limits_of_their_own_and_kept_logits_keep_their_values():
    logits = torch.randn(3, 50)
    before = logits.clone()
    masked = mask_top_k_top_p_min_p(
        logits, torch.tensor([0, 5, 1], dtype=torch.int32), torch.tensor([1.0, 1.0, 0.3]), torch.zeros(3)
    )
    assert (masked > -math.inf).sum(-1).tolist() == [50, 5, 1]
    assert torch.equal(logits, before)
    finite = masked > -math.inf
    assert torch.equal(masked[finite], logits[finite])
