from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.kernels import paged_attention as module
from stepahead.kernels.paged_attention import (
    paged_attention_numba,
    paged_attention_reference,
    paged_attention_triton,
)


@dataclass
class Batch:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    max_query_len: int
    max_seq_len: int
    sliding_window: int

    def arguments(self) -> tuple:
        return tuple(vars(self).values())

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in self.arguments()))


def make_batch(
    rows: list[tuple[int, int]],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    block_size: int = 16,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """rows: (computed, query_len) each; query_len 0 stands for a padding row of one token and no context.

    Whatever no row may use holds NaN or infinity, and unused table entries name such blocks.
    """
    seq_lens = [computed + query_len if query_len else 0 for computed, query_len in rows]
    query_lens = [max(query_len, 1) for _, query_len in rows]
    width = max(seq_lens) // block_size + 2
    num_blocks = len(rows) * width
    k_cache = torch.full((num_blocks, block_size, kv_heads, dim), torch.nan, dtype=dtype)
    v_cache = torch.full_like(k_cache, torch.inf)
    tables = torch.randperm(num_blocks, dtype=torch.int32).view(len(rows), width)
    for (computed, _), table, seq_len in zip(rows, tables, seq_lens, strict=True):
        for position in range(max(computed + 1 - window, 0) if window else 0, seq_len):
            place = table[position // block_size], position % block_size
            k_cache[place] = torch.randn(kv_heads, dim)
            v_cache[place] = torch.randn(kv_heads, dim)
    return Batch(
        q=torch.randn(sum(query_lens), heads, dim, dtype=dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        scale=dim**-0.5,
        max_query_len=max(query_lens),
        max_seq_len=max(*seq_lens, 1),
        sliding_window=window,
    )


def slow_attention(batch: Batch) -> torch.Tensor:
    """One query at a time, in float64."""
    out = torch.zeros_like(batch.q, dtype=torch.float64)
    block_size, group = batch.k_cache.shape[1], batch.q.shape[1] // batch.k_cache.shape[2]
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        begin, end = batch.query_start[row : row + 2].tolist()
        for token in range(begin, end if seq_len else begin):
            last = seq_len - (end - token)
            first = max(last + 1 - batch.sliding_window, 0) if batch.sliding_window else 0
            position = torch.arange(first, last + 1)
            place = batch.block_tables[row][position // block_size].long(), position % block_size
            k = batch.k_cache[place].double().repeat_interleave(group, dim=1)
            v = batch.v_cache[place].double().repeat_interleave(group, dim=1)
            weights = (torch.einsum("hd,lhd->hl", batch.q[token].double(), k) * batch.scale).softmax(-1)
            out[token] = torch.einsum("hl,lhd->hd", weights, v)
    return out


CASES = {
    "one decode row": {"rows": [(0, 1)]},
    "decode rows of very different lengths": {"rows": [(600, 1), (0, 1), (15, 1), (16, 1), (37, 1)]},
    "one prefill": {"rows": [(0, 33)]},
    "a chunk behind computed tokens": {"rows": [(50, 70)]},
    "decode rows, chunks and padding mixed": {"rows": [(20, 1), (0, 40), (3, 2), (0, 0), (64, 17), (300, 1)]},
    "window over decode rows": {"rows": [(40, 1), (3, 1), (200, 1)], "window": 20},
    "window over chunks": {"rows": [(90, 50), (0, 70), (10, 1)], "window": 9},
    "window over split decode rows": {"rows": [(900, 1), (530, 1), (3, 1), (0, 0)], "window": 520},
    "window of one token": {"rows": [(5, 30), (9, 1)], "window": 1},
    "window longer than any row": {"rows": [(5, 30), (9, 1)], "window": 1000},
    "no sharing of KV heads": {"rows": [(20, 1), (9, 12)], "heads": 3, "kv_heads": 3},
    "one KV head for all": {"rows": [(20, 1), (9, 12)], "heads": 20, "kv_heads": 1},
    "group of three": {"rows": [(20, 1), (9, 45)], "heads": 9, "kv_heads": 3},
    "head_dim 24": {"rows": [(20, 1), (9, 12)], "dim": 24},
    "head_dim 80": {"rows": [(20, 1), (9, 12)], "dim": 80},
    "head_dim 256": {"rows": [(20, 1), (9, 12)], "dim": 256},
    "block_size 1": {"rows": [(20, 1), (9, 12)], "block_size": 1},
    "block_size 256": {"rows": [(300, 1), (9, 12)], "block_size": 256},
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# Triton's interpreter multiplies the bits of bfloat16 matrices as integers.
KERNEL_DTYPES = [dtype for dtype in TOLERANCE if torch.cuda.is_available() or dtype != torch.bfloat16]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_reference_equals_attention_by_hand(case, dtype):
    batch = make_batch(**CASES[case], dtype=dtype)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(paged_attention_reference(*batch.arguments()).double(), slow_attention(batch), **close)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_attention_by_hand(device, case, dtype):
    batch = make_batch(**CASES[case], dtype=dtype)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    out = paged_attention_triton(*batch.to(device).arguments())
    torch.testing.assert_close(out.cpu().double(), slow_attention(batch), **close)


# Every size is compiled anew, which takes seconds.
NUMBA_CASES = [(name, torch.float32) for name, case in CASES.items() if case.get("dim", 16) in (16, 80)]
NUMBA_CASES += [("group of three", torch.bfloat16), ("decode rows of very different lengths", torch.bfloat16)]


@pytest.mark.parametrize(("case", "dtype"), NUMBA_CASES)
def test_numba_kernel_equals_attention_by_hand(case, dtype):
    pytest.importorskip("numba")
    batch = make_batch(**CASES[case], dtype=dtype)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(paged_attention_numba(*batch.arguments()).double(), slow_attention(batch), **close)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 700), st.sampled_from([0, 1, 1, 1, 2])), min_size=1, max_size=5),
    window=st.sampled_from([0, 0, 1, 17, 300]),
)
def test_numba_kernel_equals_reference_on_any_batch(rows, window):
    pytest.importorskip("numba")
    batch = make_batch(rows, heads=6, kv_heads=2, window=window)
    torch.testing.assert_close(
        paged_attention_numba(*batch.arguments()), paged_attention_reference(*batch.arguments()), rtol=1e-5, atol=1e-5
    )


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 700), min_size=2, max_size=5), window=st.sampled_from([0, 300]))
def test_a_row_attends_the_same_to_the_last_bit_alone_and_among_others(lengths, window):
    pytest.importorskip("numba")
    batch = make_batch([(length, 1) for length in lengths], window=window)
    together = paged_attention_numba(*batch.arguments())
    for row, length in enumerate(lengths):
        alone = Batch(
            batch.q[row : row + 1], batch.k_cache, batch.v_cache, batch.block_tables[row : row + 1],
            torch.tensor([0, 1], dtype=torch.int32), batch.seq_lens[row : row + 1],
            batch.scale, 1, length + 1, window,
        )  # fmt: skip
        assert torch.equal(paged_attention_numba(*alone.arguments())[0], together[row])


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 70), st.sampled_from([0, 1, 1, 2, 9, 40])), min_size=1, max_size=5),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    window=st.sampled_from([0, 0, 1, 17, 64]),
)
def test_kernel_equals_reference_on_any_batch(device, rows, kv_heads, group, window):
    batch = make_batch(rows, heads=kv_heads * group, kv_heads=kv_heads, window=window)
    expected = paged_attention_reference(*batch.arguments())
    torch.testing.assert_close(
        paged_attention_triton(*batch.to(device).arguments()).cpu(), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("attention", [paged_attention_reference, paged_attention_triton, paged_attention_numba])
def test_padding_rows_come_back_as_zeros(device, attention):
    if attention is paged_attention_numba:
        pytest.importorskip("numba")
    batch = make_batch([(0, 0), (5, 3), (0, 0)])
    if attention is paged_attention_triton:
        batch = batch.to(device)
    out = attention(*batch.arguments())
    assert not out[0].any()
    assert not out[-1].any()


def test_a_step_without_tokens_is_no_error(device):
    batch = make_batch([(0, 1)]).to(device)
    batch.q = batch.q[:0]
    batch.seq_lens, batch.block_tables = batch.seq_lens[:0], batch.block_tables[:0]
    batch.query_start = batch.query_start[:1]
    assert paged_attention_triton(*batch.arguments()).shape == (0, 4, 16)
    if device.type == "cpu":
        assert paged_attention_reference(*batch.arguments()).shape == (0, 4, 16)


def test_queries_may_be_a_view_of_a_fused_projection(device):
    batch = make_batch([(20, 1), (9, 12)])
    expected = paged_attention_reference(*batch.arguments())
    fused = torch.cat((batch.q, torch.randn_like(batch.q)), dim=1)
    batch.q = fused[:, : batch.q.shape[1]]
    torch.testing.assert_close(paged_attention_reference(*batch.arguments()), expected)
    torch.testing.assert_close(paged_attention_triton(*batch.to(device).arguments()).cpu(), expected)


def test_rows_run_in_small_groups_give_the_same_result(monkeypatch):
    batch = make_batch([(n, 1) for n in (3, 50, 50, 9, 200, 50)])
    expected = paged_attention_reference(*batch.arguments())
    monkeypatch.setattr(module, "_GROUP_ELEMENTS", 128 * 2 * 16)
    torch.testing.assert_close(paged_attention_reference(*batch.arguments()), expected)


def test_chunks_longer_than_a_query_tile_see_all_their_keys(monkeypatch):
    monkeypatch.setattr(module, "_QUERY_TILE", 16)
    for window in (0, 5):
        batch = make_batch([(11, 50)], window=window)
        torch.testing.assert_close(
            paged_attention_reference(*batch.arguments()).double(), slow_attention(batch), rtol=1e-5, atol=1e-5
        )
