"""What structured output plugs into the step loop."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Grammar(Protocol):
    """Constrains the tokens of some requests. Called by the step loop only, between device steps."""

    def constrains(self, request_id: int) -> bool:
        """Whether the request is structured at all."""

    def masks(self, request_ids: np.ndarray) -> np.ndarray:
        """What each structured request may sample next, all its tokens known.

        request_ids: int64 [m]. Returns uint32 [m, ceil(vocab / 32)], as GrammarMasks.bits.
        """

    def advance(self, request_ids: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> None:
        """Tokens were sampled: the fields of OutputBatch, structured requests or not."""

    def finished(self, request_id: int) -> None:
        """The request has left."""
