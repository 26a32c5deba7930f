"""What changes logits before sampling: pure functions on device tensors, m rows each.

Everything that depends on tokens already sampled reads the batch's device-side columns, which are never late.
Each takes logits float32 [m, vocab], may change them in place, and returns them.
"""

from __future__ import annotations

import torch

MINUS_INF = float("-inf")


def apply_token_bits(logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """bits: int32 [m, ceil(vocab / 32)]; only tokens whose bit (t % 32 of word t // 32) is set stay possible."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bits.unsqueeze(2) >> shifts) & 1
    return logits.masked_fill_(allowed.flatten(1)[:, : logits.shape[1]] == 0, MINUS_INF)


def apply_bad_words(
    logits: torch.Tensor,
    prefixes: torch.Tensor,
    last: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
) -> torch.Tensor:
    """Forbids the last token of each bad word whose other tokens are the latest tokens of the row.

    prefixes: int32 [m, words, length], latest token first, -1 matches anything. last: int32 [m, words], -1 for
    no word. token_ids: int32 [m, max_len], known tokens of prompt and output. num_tokens: int32 [m].
    """
    positions = num_tokens.unsqueeze(1) - 1 - torch.arange(prefixes.shape[2], device=logits.device)
    tail = token_ids.gather(1, positions.clamp_min(0).long())
    # No token id is -2, so what lies before the first token matches only "anything".
    tail = torch.where(positions < 0, -2, tail)
    fits = ((prefixes == tail.unsqueeze(1)) | (prefixes == -1)).all(2) & (last >= 0)
    return _forbid(logits, last, fits)


def apply_min_tokens(
    logits: torch.Tensor, stop_ids: torch.Tensor, min_tokens: torch.Tensor, num_output: torch.Tensor
) -> torch.Tensor:
    """Forbids stop_ids (int32 [m, width], -1 for none) until num_output [m] sampled tokens reach min_tokens [m]."""
    too_early = (num_output < min_tokens).unsqueeze(1)
    return _forbid(logits, stop_ids, too_early & (stop_ids >= 0))


def apply_logit_bias(logits: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """ids: int32 [m, width]. bias: float32 [m, width], 0 where there is none."""
    return logits.scatter_add_(1, ids.long(), bias)


def apply_penalties(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_prompt: torch.Tensor,
    num_tokens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """repetition: divides positive and multiplies negative logits of tokens in prompt or output (1 is none).
    presence: taken off tokens in the output. frequency: taken off once for each time in the output.

    token_ids: int32 [m, max_len]. num_prompt, num_tokens: int32 [m]. The rest: float32 [m].
    """
    known = torch.arange(token_ids.shape[1], device=logits.device).unsqueeze(0)
    index = token_ids.long()
    in_context = (known < num_tokens.unsqueeze(1)).int()
    in_output = in_context * (known >= num_prompt.unsqueeze(1)).int()
    seen = torch.zeros_like(logits, dtype=torch.int32).scatter_add_(1, index, in_context) > 0
    counts = torch.zeros_like(logits, dtype=torch.int32).scatter_add_(1, index, in_output)
    factor = repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen, repeated, logits)
    logits -= frequency.unsqueeze(1) * counts
    logits -= presence.unsqueeze(1) * (counts > 0)
    return logits


def _forbid(logits: torch.Tensor, ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """ids: int32 [m, width], below 0 where `where` is False. where: bool [m, width]."""
    # Added, not stored: the same id may stand twice in a row, forbidden once and not the other time.
    penalty = torch.zeros(ids.shape, device=logits.device).masked_fill_(where, MINUS_INF)
    return logits.scatter_add_(1, ids.clamp_min(0).long(), penalty)
