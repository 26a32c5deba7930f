"""A model that cannot be used is one line for the user, and nothing is left running."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stepahead import LLM, ConfigError
from tiny_models import make_tiny_model


def truncate(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def drop_weights(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.unlink()


def rename_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPTOfTomorrow"]}))


def break_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def drop_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("harm", "settings", "words"),
    [
        (truncate, {}, "model.safetensors"),
        (truncate, {"executor": "uni"}, "model.safetensors"),
        (drop_weights, {}, "safetensors"),
        (rename_architecture, {}, "LlamaForCausalLM"),
        (break_json, {}, "config.json"),
        (drop_tokenizer, {}, "tokenizer"),
        (lambda folder: None, {"max_model_len": 10**6}, "max_model_len=1000000"),
        (lambda folder: None, {"num_kv_blocks": 2, "max_model_len": 200}, "KV pool of 32 tokens"),
        (lambda folder: None, {"kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes"),
        (lambda folder: None, {"device": "cuda"}, "cuda"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_is_told_in_one_line_and_no_process_stays(
    tmp_path: Path, harm: Callable[[Path], None], settings: dict[str, object], words: str
) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path, tokenizer=True)
    harm(folder)
    with pytest.raises(ConfigError) as caught:
        LLM(str(folder), **{"device": "cpu", **settings})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert psutil.Process().children(recursive=True) == []
