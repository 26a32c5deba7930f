"""Structured output in the step loop: what a grammar is asked, and when a step's masks can be known."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..worker.messages import GrammarMasks
from .messages import EngineRequest, OutputBatch
from .request_table import RequestTable
from .scheduler import ScheduledStep


class Grammar(Protocol):
    """Constrains the tokens of some requests. Called by the step loop only, between device steps."""

    def constrains(self, request: EngineRequest) -> bool:
        """Whether the request is structured. Asked once, when it arrives."""

    def masks(self, request_ids: np.ndarray) -> np.ndarray:
        """What each structured request may sample next, all its tokens known.

        request_ids: int64 [m]. Returns uint32 [m, ceil(vocab / 32)], as GrammarMasks.bits.
        """

    def advance(self, request_ids: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> None:
        """Tokens were sampled: the fields of OutputBatch, structured requests or not."""

    def finished(self, request_id: int) -> None:
        """The request has left. May be told of requests it never constrained, and twice."""


class GrammarGate:
    """Asks the grammar, if there is one, for the masks of a step."""

    def __init__(self, grammar: Grammar | None, table: RequestTable) -> None:
        self._grammar = grammar
        self._table = table

    def constrains(self, request: EngineRequest) -> bool:
        return self._grammar is not None and self._grammar.constrains(request)

    def awaits_tokens(self, step: ScheduledStep) -> bool:
        """Whether a structured row's previous token is in flight: placeholders besides this step's own."""
        if self._grammar is None:
            return False
        slots = step.plan.slots[self._structured_rows(step)]
        return bool((self._table.num_placeholders[slots] > 1).any())

    def masks(self, step: ScheduledStep) -> GrammarMasks | None:
        if self._grammar is None:
            return None
        rows = self._structured_rows(step)
        if not rows.size:
            return None
        return GrammarMasks(rows, self._grammar.masks(self._table.request_id[step.plan.slots[rows]]))

    def advance(self, batch: OutputBatch) -> None:
        if self._grammar is not None:
            self._grammar.advance(batch.request_ids, batch.counts, batch.tokens)
            for finished in batch.finished:
                self._grammar.finished(finished.request_id)

    def finished(self, request_id: int) -> None:
        if self._grammar is not None:
            self._grammar.finished(request_id)

    def _structured_rows(self, step: ScheduledStep) -> np.ndarray:
        """Indices of the plan's rows that sample under the grammar and whose request is still here. int32 [m]."""
        table, slots = self._table, step.plan.slots
        alive = table.generation[slots] == step.generations
        return np.flatnonzero(table.structured[slots] & alive & step.plan.samples).astype(np.int32)
