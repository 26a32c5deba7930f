"""Which architectures there are, and where. Importing this loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "HashLM": (".hash_lm", "HashLM"),
    "LlamaForCausalLM": (".transformer", "Transformer"),
    "MistralForCausalLM": (".transformer", "Transformer"),
    "Qwen2ForCausalLM": (".transformer", "Transformer"),
    "Qwen3ForCausalLM": (".transformer", "Transformer"),
}

SUPPORTED = tuple(_HOME)


def model_class(architecture: str) -> Any:
    """The class (see base.Model) of an architecture in SUPPORTED. Loads torch."""
    module, name = _HOME[architecture]
    return getattr(import_module(module, __package__), name)
