"""Log-probabilities of chosen tokens, of the most likely ones, and of prompt tokens. All of it on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_SLICE_ELEMENTS = 16 * 1024 * 1024
"""Logits held at once for prompt tokens: 64 MiB of float32, and their log-softmax besides."""


@dataclass(frozen=True)
class DeviceLogprobs:
    """token_ids: int32 [m, 1 + k], the chosen token first. logprobs: float32 [m, 1 + k]. ranks: int32 [m]."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


def gather_logprobs(logprobs: torch.Tensor, chosen: torch.Tensor, k: int) -> DeviceLogprobs:
    """logprobs: float32 [m, vocab]. chosen: int [m]. k: top entries besides, at most vocab.

    A token's rank is one more than the number of tokens that are strictly more likely.
    """
    index = chosen.long().unsqueeze(1)
    value = logprobs.gather(1, index)
    ranks = (logprobs > value).sum(1) + 1
    top_values, top_ids = logprobs.topk(k, dim=1)
    return DeviceLogprobs(
        token_ids=torch.cat([index, top_ids], 1).int(),
        logprobs=torch.cat([value, top_values], 1),
        ranks=ranks.int(),
    )


def prompt_logprobs(
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    index: torch.Tensor,
    targets: torch.Tensor,
    k: int,
    vocab_size: int,
) -> DeviceLogprobs:
    """hidden: [t, hidden]. index: int64 [m], the rows of hidden to score. targets: int32 [m], the token that
    follows each in the prompt. Works in slices, so that m tokens never need [m, vocab] at once."""
    rows = max(1, _SLICE_ELEMENTS // vocab_size)
    parts = []
    for start in range(0, len(index), rows):
        logits = compute_logits(hidden[index[start : start + rows]])
        parts.append(gather_logprobs(logits.float().log_softmax(1), targets[start : start + rows], k))
    if len(parts) == 1:
        return parts[0]
    return DeviceLogprobs(
        token_ids=torch.cat([p.token_ids for p in parts]),
        logprobs=torch.cat([p.logprobs for p in parts]),
        ranks=torch.cat([p.ranks for p in parts]),
    )
