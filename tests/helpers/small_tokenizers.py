"""Small tokenizers of the kinds that models have, made on the spot. Each has <unk>, <s>, </s> as ids 0, 1, 2."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The sea is wide, and the ship sails on; the captain said: 'Stop there!' She sees 12 whales.",
    "naïve café — “Größe” привет мир こんにちは世界 你好世界",
    "def f(x):\n    return x + 1\n\n\tindented   spaces",
    "smile 😀 and 👩‍👩‍👧 family 🇫🇷",
]
SPECIAL = ["<unk>", "<s>", "</s>"]


def wrap(tokenizer: Tokenizer, **settings: object) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        **settings,
    )


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen and SmolLM: tokens spell UTF-8 bytes. One added token is no special one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<tool call> é", normalized=False)])
    return wrap(tokenizer)


@cache
def llama_like(strip: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral: ▁ for spaces, one put before the text, bytes as <0xHH>. Without strip: as Gemma."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    trained.train_from_iterator([TEXT[0], TEXT[2].replace("\n", " ")], trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    pieces[3:3] = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    tokenizer.add_special_tokens(SPECIAL)
    return wrap(tokenizer)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """As T5: ▁ for spaces, no bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return wrap(tokenizer)


@cache
def word_pieces() -> PreTrainedTokenizerFast:
    """As BERT: ## continues a word. Its decoder looks at neighbours, so it takes the slow road."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return wrap(tokenizer)
