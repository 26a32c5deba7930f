"""Tiny random models in Hugging Face's folder layout, made on the spot: tests download nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
BOS, EOS, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, IM_START, IM_END)
"""Their ids are their places here."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "The sea is wide and the sky is blue. What is the capital of France? Paris is the capital of France.",
    "A quick brown fox jumps over the lazy dog, and then the dog sleeps under the old tree.",
)

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def make_tiny_model(
    architecture: str,
    folder: str | Path,
    *,
    tokenizer: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Writes a model with random weights (norms and biases too) and returns its folder.

    architecture: one of ours, "HashLM" included (a config.json alone). tokenizer: write a working one
    with a chat template, too. overrides: fields of the architecture's config class.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if architecture == "HashLM":
        _write_hash_lm(folder, overrides)
    else:
        _write_transformer(architecture, folder, dtype, seed, max_shard_size, overrides)
    if tokenizer:
        write_tokenizer(folder, overrides.get("vocab_size", VOCAB_SIZE))
    return folder


def write_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A byte-level BPE tokenizer: any text survives encoding and decoding. vocab_size: 260 at least."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    assert bpe.get_vocab_size() <= vocab_size, f"a byte-level vocabulary does not fit in {vocab_size} tokens"
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[IM_START, IM_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)


def _write_hash_lm(folder: Path, overrides: dict[str, Any]) -> None:
    config = {
        "architectures": ["HashLM"],
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "step_ms": 0.0,
        "eos_token_id": 1,
        **overrides,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _write_transformer(
    architecture: str, folder: Path, dtype: str, seed: int, max_shard_size: str, overrides: dict[str, Any]
) -> None:
    import torch
    import transformers

    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**_SIZES, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            # Transformers starts biases at zero and norms at one, which would hide one that is left out.
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
            else:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
