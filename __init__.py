"""stepahead: an LLM inference engine whose CPU plans one step ahead of the GPU.

Public names are imported on first use, so that `import stepahead` stays fast and loads no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import ConfigError, EngineDeadError, InvalidRequestError, StepaheadError
    from .frontend.async_llm import AsyncLLM
    from .frontend.llm import LLM
    from .frontend.outputs import CompletionOutput, RequestOutput
    from .frontend.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"

_HOME = {
    "AsyncLLM": ".frontend.async_llm",
    "CompletionOutput": ".frontend.outputs",
    "ConfigError": ".errors",
    "EngineDeadError": ".errors",
    "InvalidRequestError": ".errors",
    "LLM": ".frontend.llm",
    "RequestOutput": ".frontend.outputs",
    "RequestOutputKind": ".frontend.sampling_params",
    "SamplingParams": ".frontend.sampling_params",
    "StepaheadError": ".errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "EngineDeadError",
    "InvalidRequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StepaheadError",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'stepahead' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
