"""What LLM and AsyncLLM tell of their engine."""

from __future__ import annotations

from typing import Any

from ..engine_core.messages import EngineInfo
from ..errors import InvalidRequestError
from .engine_setup import Engine


class EngineOwner:
    _engine: Engine

    @property
    def engine_info(self) -> EngineInfo:
        return self._engine.client.info

    @property
    def async_scheduling(self) -> bool:
        return self.engine_info.async_scheduling

    @property
    def async_reason(self) -> str:
        """Why async scheduling is on or off."""
        return self.engine_info.async_reason

    @property
    def has_tokenizer(self) -> bool:
        """False with skip_tokenizer_init: then no text comes out."""
        return self._engine.tokenizer is not None

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises: InvalidRequestError with skip_tokenizer_init."""
        if self._engine.tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer (skip_tokenizer_init=True)")
        return self._engine.tokenizer
