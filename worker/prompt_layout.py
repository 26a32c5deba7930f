"""Which prompt tokens a step scores, for requests that ask for prompt log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .async_output import PromptPart
from .host_ring import Field, HostBuffer
from .messages import NewRequest, StepPlan


@dataclass(frozen=True)
class PromptLayout:
    """m prompt tokens to score. index: int64 [m], places among the step's t tokens. slots, positions: int64
    [m], where in all_token_ids the token after each stands. k: the most top entries any of the rows asks."""

    index: Field
    slots: Field
    positions: Field
    k: int
    parts: list[PromptPart]

    @property
    def num_scored(self) -> int:
        return self.parts[-1].end


class PromptTracker:
    """Main thread. Follows by slot how far the prompt is computed, from the plans alone."""

    def __init__(self, num_slots: int) -> None:
        self._num_prompt = np.zeros(num_slots, np.int32)
        self._num_computed = np.zeros(num_slots, np.int32)

    def admit(self, requests: Sequence[NewRequest]) -> None:
        for request in requests:
            self._num_prompt[request.slot] = request.num_prompt
            self._num_computed[request.slot] = request.num_computed

    def stage(
        self, plan: StepPlan, query_start: np.ndarray, wanted: np.ndarray, buffer: HostBuffer
    ) -> PromptLayout | None:
        """wanted: int32 [n], top entries each row asks for, -1 for none. Counts the step as computed."""
        first = self._num_computed[plan.slots]
        self._num_computed[plan.slots] += plan.num_query
        if wanted.max() < 0:
            return None
        # The last prompt token is followed by a sampled one, whose log-probability is the sampler's.
        last = np.minimum(first + plan.num_query, self._num_prompt[plan.slots] - 1)
        rows = np.flatnonzero((wanted >= 0) & (last > first))
        if not len(rows):
            return None
        counts = (last - first)[rows].astype(np.int64)
        ends = np.cumsum(counts)
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        parts = [
            PromptPart(int(row), int(first[row]) + 1, int(end - count), int(end))
            for row, count, end in zip(rows, counts, ends, strict=True)
        ]
        return PromptLayout(
            index=buffer.add(np.repeat(query_start[rows].astype(np.int64), counts) + within),
            slots=buffer.add(np.repeat(plan.slots[rows].astype(np.int64), counts)),
            positions=buffer.add(np.repeat(first[rows].astype(np.int64), counts) + within + 1),
            k=int(wanted[rows].max()),
            parts=parts,
        )
