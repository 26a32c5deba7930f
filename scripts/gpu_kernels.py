"""Random arguments for each kernel, at the sizes of real models, and how far a device's results are off."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from stepahead.kernels.combine_sampled_and_draft_tokens import combine_sampled_and_draft_tokens
from stepahead.kernels.gumbel_sample import gumbel_sample
from stepahead.kernels.kv_write import kv_write
from stepahead.kernels.paged_attention import paged_attention
from stepahead.kernels.post_update import post_update
from stepahead.kernels.prepare_inputs import prepare_inputs
from stepahead.kernels.rms_norm import add_rms_norm, rms_norm
from stepahead.kernels.rope import apply_rope
from stepahead.kernels.silu_and_mul import silu_and_mul
from stepahead.kernels.staged_write import staged_write
from stepahead.kernels.top_k_top_p import mask_top_k_top_p_min_p

BF16, F32 = torch.bfloat16, torch.float32
SLOTS, MAX_LEN, BLOCK_SIZE = 24, 700, 16
QUERIES = [1] * 6 + [130, 1, 17, 300]
"""Query lengths of a mixed step's rows."""


class Call(NamedTuple):
    """allowed: difference over 1 + |value|. Tensors among the arguments that it writes are compared too."""

    function: Callable[..., Any]
    arguments: list[Any]
    allowed: float = 0.0


def largest_difference(case: Callable[[], Call], device: torch.device) -> tuple[float, float]:
    """(allowed, found), over all results and arguments of the call on `device` and on the CPU."""
    call = case()
    there = [x.to(device) if isinstance(x, torch.Tensor) else x for x in call.arguments]
    on_device, on_host = _tensors(call.function(*there)), _tensors(call.function(*call.arguments))
    pairs = zip(on_device + _tensors(there), on_host + _tensors(call.arguments), strict=True)
    return call.allowed, max(_difference(ours.cpu(), truth) for ours, truth in pairs)


def _tensors(values: Any) -> list[torch.Tensor]:
    values = values if isinstance(values, (list, tuple)) else [values]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _difference(ours: torch.Tensor, truth: torch.Tensor) -> float:
    if not truth.numel():
        return 0.0
    ours, truth = ours.double(), truth.double()
    same = (ours == truth) | (ours.isnan() & truth.isnan())
    return torch.where(same, 0.0, (ours - truth).abs() / (1 + truth.abs())).nan_to_num(nan=torch.inf).max().item()


def _norm(function: Callable[..., Any], dtype: torch.dtype, width: int) -> Call:
    x, residual = torch.randn(2, 33, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    arguments = [x, weight, 1e-6] if function is rms_norm else [x, residual, weight, 1e-6]
    return Call(function, arguments, _tolerance(dtype))


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == F32 else 1.6e-2


def _silu(dtype: torch.dtype) -> Call:
    return Call(silu_and_mul, [torch.randn(33, 2 * 3072).to(dtype)], _tolerance(dtype))


def _rope(dtype: torch.dtype, dim: int) -> Call:
    angles = torch.rand(MAX_LEN, dim // 2) * 6
    positions = torch.randint(0, MAX_LEN, (33,))
    q, k = torch.randn(33, 16, dim).to(dtype), torch.randn(33, 8, dim).to(dtype)
    return Call(apply_rope, [q, k, positions, torch.cat((angles.cos(), angles.sin()), -1)], _tolerance(dtype))


def _kv_write(dtype: torch.dtype) -> Call:
    k, v = torch.randn(2, 33, 8, 128).to(dtype)
    places = torch.randperm(64 * BLOCK_SIZE)[:33]
    places[::7] = -1
    return Call(kv_write, [k, v, *torch.zeros(2, 64, BLOCK_SIZE, 8, 128).to(dtype), places])


def _attention(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, queries: list[int], window: int = 0) -> Call:
    rows = len(queries)
    computed = torch.randint(0, MAX_LEN - max(queries), (rows,))
    seq_lens = (computed + torch.tensor(queries)).int()
    width = -(-MAX_LEN // BLOCK_SIZE)
    tables = torch.randperm(rows * width).int().view(rows, width)
    caches = torch.randn(2, rows * width, BLOCK_SIZE, kv_heads, dim).to(dtype)
    q = torch.randn(sum(queries), heads, dim).to(dtype)
    bounds = [max(queries), int(seq_lens.max()), window]
    return Call(
        paged_attention, [q, *caches, tables, _starts(queries), seq_lens, dim**-0.5, *bounds], 4 * _tolerance(dtype)
    )


def _starts(queries: list[int]) -> torch.Tensor:
    return torch.tensor([0, *queries]).cumsum(0).int()


def _slots() -> torch.Tensor:
    return torch.randperm(SLOTS)[: len(QUERIES)].int()


def _prepare() -> Call:
    computed = torch.randint(0, MAX_LEN - max(QUERIES), (SLOTS,)).int()
    table = torch.randperm(SLOTS * 44).int().view(SLOTS, 44)
    return Call(prepare_inputs, [_slots(), _starts(QUERIES), computed, table, BLOCK_SIZE, sum(QUERIES), max(QUERIES)])


def _combine() -> Call:
    positions = torch.cat([torch.arange(5, 5 + n) for n in QUERIES])
    known = torch.randint(0, 999, (SLOTS, MAX_LEN)).int()
    prefill = torch.tensor([6, 400] * (SLOTS // 2)).int()
    last, drafts = torch.randint(0, 999, (2, SLOTS, 1)).int()
    return Call(
        combine_sampled_and_draft_tokens,
        [_slots(), _starts(QUERIES), positions, known, prefill, prefill + 0, last, drafts, max(QUERIES)],
    )


def _post_update() -> Call:
    n = len(QUERIES)
    sampled, num_sampled = torch.randint(0, 999, (n, 1)).int(), torch.randint(0, 2, (n,)).int()
    computed, known = torch.randint(0, MAX_LEN - 1, (2, SLOTS)).int()
    state = [computed, known, torch.zeros(SLOTS, MAX_LEN).int(), torch.zeros(SLOTS, 1).int()]
    return Call(post_update, [_slots(), _starts(QUERIES), sampled, num_sampled, None, *state])


def _staged_write() -> Call:
    values = torch.arange(sum(QUERIES)).int()
    target = torch.zeros(SLOTS, MAX_LEN).int()
    return Call(
        staged_write, [target, _slots(), torch.randint(0, 99, (len(QUERIES),)).int(), _starts(QUERIES), values, 300]
    )


def _sample(heat: float, vocab: int) -> Call:
    """Logits far enough apart that the last bit of a logarithm decides nothing."""
    logits = torch.randn(33, vocab)
    seeds, positions = torch.randint(-(2**62), 2**62, (33,)), torch.randint(0, 5000, (33,))
    return Call(gumbel_sample, [logits, torch.full((33,), heat), seeds, positions])


def _truncate() -> Call:
    top_k = torch.tensor([0, 1, 5, 50] * 8).int()
    top_p, min_p = torch.tensor([1.0, 0.9, 0.5, 0.99] * 8), torch.tensor([0.0, 0.1] * 16)
    return Call(mask_top_k_top_p_min_p, [torch.randn(32, 4000), top_k, top_p, min_p], 1e-6)


CASES: dict[str, Callable[[], Call]] = {
    **{f"rms_norm {d} {w}": partial(_norm, rms_norm, d, w) for d in (F32, BF16) for w in (128, 1024, 4096)},
    **{f"add_rms_norm {d} {w}": partial(_norm, add_rms_norm, d, w) for d in (F32, BF16) for w in (1024, 4096)},
    **{f"silu_and_mul {d}": partial(_silu, d) for d in (F32, BF16)},
    **{f"rope {d} {dim}": partial(_rope, d, dim) for d in (F32, BF16) for dim in (64, 128)},
    **{f"kv_write {d}": partial(_kv_write, d) for d in (F32, BF16)},
    **{
        f"attention {d} {heads}/{kv_heads} heads of {dim}, {what}, window {window}": partial(
            _attention, d, heads, kv_heads, dim, queries, window
        )
        for d in (F32, BF16)
        for heads, kv_heads, dim in ((16, 8, 128), (32, 8, 128), (9, 3, 64))
        for what, queries in (("decode", [1] * 12), ("mixed", QUERIES))
        for window in (0, 100)
    },
    "prepare_inputs": _prepare,
    "combine_sampled_and_draft_tokens": _combine,
    "post_update": _post_update,
    "staged_write": _staged_write,
    "argmax": partial(_sample, 0.0, 151936),
    "gumbel_sample": partial(_sample, 1.0, 32000),
    "top_k_top_p_min_p": _truncate,
}
