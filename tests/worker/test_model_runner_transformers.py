"""Real architectures through the model runner, two steps in flight and in chunks, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from step_driver import BLOCK_SIZE, CPU, MAX_LEN, NUM_SLOTS, StepDriver
from stepahead.config import parse_settings, resolve
from stepahead.worker.loader import load_model
from stepahead.worker.messages import SamplingOptions
from stepahead.worker.model_config import read_model_config
from stepahead.worker.parallel import ParallelGroup
from tiny_models import VOCAB_SIZE, make_tiny_model

COUNT = 12


def make_driver(folder: Path) -> StepDriver:
    settings = {
        "device": "cpu", "block_size": BLOCK_SIZE, "max_num_seqs": NUM_SLOTS, "max_model_len": MAX_LEN,
    }  # fmt: skip
    config = resolve(parse_settings(str(folder), settings), read_model_config(folder), executor_supports_async=True)
    return StepDriver(config, load_model(config, CPU, ParallelGroup()))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_greedy_tokens_and_logprobs_equal_transformers(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(architecture, tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(1)
    lengths = {0: 1, 3: 13, 6: 37}
    prompts = {s: torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for s, n in lengths.items()}

    driver = make_driver(folder)
    options = SamplingOptions(seed=0, temperature=0.0, logprobs=2)
    for slot, prompt in prompts.items():
        driver.admit(slot, str(slot), prompt, options)
    while any(row.num_computed < lengths[slot] for slot, row in driver.rows.items()):
        driver.start({s: min(5, r.num_tokens - r.num_computed) for s, r in driver.rows.items()})
        if len(driver.in_flight) == 2:
            driver.finish()
    driver.run(COUNT)
    driver.close()

    for row, (slot, prompt) in enumerate(prompts.items()):
        tokens = driver.tokens[str(slot)]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(1).tolist()
        last = driver.outputs[-1].logprobs
        assert last is not None
        expected = logits[-1].log_softmax(0).topk(2).values
        assert last.logprobs[row, 1:].tolist() == pytest.approx(expected.tolist(), abs=1e-3)
