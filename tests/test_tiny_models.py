"""The models that tests make behave like downloaded ones."""

from __future__ import annotations

from pathlib import Path

from tiny_models import make_tiny_model


def test_tiny_tokenizer_keeps_any_text_and_has_a_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_tiny_model("LlamaForCausalLM", tmp_path, tokenizer=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "The sea, naïve 日本 🙂  twice"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < 320
    assert tokenizer.eos_token_id == 1
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    first = make_tiny_model("Qwen2ForCausalLM", tmp_path / "a", seed=3)
    second = make_tiny_model("Qwen2ForCausalLM", tmp_path / "b", seed=3)
    other = make_tiny_model("Qwen2ForCausalLM", tmp_path / "c", seed=4)
    contents = [(folder / "model.safetensors").read_bytes() for folder in (first, second, other)]
    assert contents[0] == contents[1] != contents[2]
