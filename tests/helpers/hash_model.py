"""A folder with HashLM and a small byte-level tokenizer: the smallest model that text can be sent to."""

from __future__ import annotations

import json
from pathlib import Path

from small_tokenizers import byte_level


def write_hash_model(folder: Path, step_ms: float = 0.0, max_position: int = 512, tokenizer: bool = True) -> str:
    """No end-of-text id: every request runs to its length unless it is stopped."""
    config = {
        "architectures": ["HashLM"],
        "vocab_size": len(byte_level()),
        "max_position_embeddings": max_position,
        "step_ms": step_ms,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        byte_level().save_pretrained(folder)
    return str(folder)
