"""transformers as the oracle: what a model folder should answer, prompt by prompt, in fp32 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class Oracle:
    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            tokens = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
            )
        return tokens[0, len(prompt) :].tolist()

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [len(tokens), vocab]: row i is the distribution of the token after tokens[: i + 1]."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)


def token_ids(output: Any) -> list[int]:
    """Of a RequestOutput's first sequence."""
    return list(output.outputs[0].token_ids)
