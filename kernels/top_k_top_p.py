"""Narrows a distribution to its likely tokens before one is drawn."""

from __future__ import annotations

import torch


def mask_top_k_top_p_min_p(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Returns logits with -inf for every dropped token; the most likely token always stays.

    In vLLM's order, a token stays when
    min-p: its probability is at least min_p times that of the most likely token (0: all);
    top-k: it is among the top_k most likely (0: all), equal ones by lower id first;
    top-p: the tokens more likely than it hold less than top_p of what those two left, renormalised (1: all).

    logits: float32 [n, vocab], already divided by the temperature. top_k: int32 [n]. top_p, min_p: float32 [n].
    """
    descending, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    top_k, top_p, min_p = top_k.unsqueeze(1), top_p.unsqueeze(1), min_p.unsqueeze(1)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = (rank < top_k) | (top_k <= 0)

    weights = (descending - descending[:, :1]).exp_()
    keep &= weights >= min_p
    weights.masked_fill_(~keep, 0.0)
    more_likely = weights.cumsum(-1) - weights
    keep &= (more_likely < top_p * weights.sum(-1, keepdim=True)) | (top_p >= 1.0)
    keep |= rank == 0
    dropped = torch.empty_like(keep).scatter_(1, token_ids, ~keep)
    return logits.masked_fill(dropped, -torch.inf)
