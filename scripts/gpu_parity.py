"""Tiny models in bf16: as near to fp32 as transformers' own bf16 is, and mostly the same greedy tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
MAX_TOKENS = 16

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 24}),
    "qwen2": ("Qwen2ForCausalLM", {}),
}


def compare(name: str, folder: Path, device: str) -> dict[str, Any]:
    """Log-probabilities of prompts, and greedy tokens: ours in one batch, transformers' prompt by prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    from stepahead import LLM, SamplingParams
    from tiny_models import make_tiny_model

    architecture, overrides = ARCHITECTURES[name]
    make_tiny_model(architecture, folder, hidden_size=128, intermediate_size=256, dtype="bfloat16", **overrides)
    rng = random.Random(1)
    prompts = [[rng.randrange(4, VOCAB_SIZE) for _ in range(n)] for n in (1, 5, 16, 33, 64, 100)]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, prompt_logprobs=0)
    with LLM(str(folder), skip_tokenizer_init=True, device=device, dtype="bfloat16", executor="uni") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    exact, peer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours_off, peer_off, agreed, compared = [], [], 0, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        truth, other = (scores(model, prompt, device) for model in (exact, peer))
        ours = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        ours_off += [abs(a - b) for a, b in zip(ours, truth, strict=True)]
        peer_off += [abs(a - b) for a, b in zip(other, truth, strict=True)]
        theirs = greedy(peer, prompt, device)
        mine = list(output.outputs[0].token_ids)
        # After the first difference the contexts differ, and so may everything; theirs end at end of text.
        same = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(theirs))
        agreed, compared = agreed + same, compared + min(same + 1, len(theirs))
    mean_ours, mean_peer = sum(ours_off) / len(ours_off), sum(peer_off) / len(peer_off)
    return {
        "logprob_error": round(mean_ours, 5),
        "logprob_error_max": round(max(ours_off), 4),
        "transformers_logprob_error": round(mean_peer, 5),
        "transformers_logprob_error_max": round(max(peer_off), 4),
        "greedy_agreement": round(agreed / compared, 3),
        "ok": mean_ours <= 2 * mean_peer + 1e-3 and agreed / compared > 0.8,
    }


def scores(model: Any, prompt: list[int], device: str) -> list[float]:
    """The log-probability of each prompt token but the first."""
    import torch

    with torch.inference_mode():
        table = model(torch.tensor([prompt], device=device)).logits[0].float().log_softmax(-1)
    return [table[i, token].item() for i, token in enumerate(prompt[1:])]


def greedy(model: Any, prompt: list[int], device: str) -> list[int]:
    import torch

    ids = torch.tensor([prompt], device=device)
    with torch.inference_mode():
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=0
        )
    return tokens[0, len(prompt) :].tolist()
