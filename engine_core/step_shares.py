"""Which running rows get how many of a step's tokens. All of it is arithmetic on the table's columns."""

from __future__ import annotations

import numpy as np

from .request_table import RequestTable


def in_turn(
    table: RequestTable, slots: np.ndarray, pending: np.ndarray, step_id: int, num_stages: int, early: bool
) -> np.ndarray:
    """What of `pending`, tokens that each of `slots` could compute, step `step_id` of a pipeline computes.

    A row decodes when its last token has passed all stages: every num_stages steps. So one step decodes only that
    share of the rows, and each stage has some to work on. early: there is nothing else to do. Rows with one token
    in flight come too: the first stage waits for it, but the step is planned and launched by then.
    """
    in_flight = table.num_placeholders[slots]
    ready = in_flight <= 1 if early else (in_flight == 0) | (step_id - table.sampled_step[slots] >= num_stages)
    pending = np.where(ready, pending, 0)
    decodes = pending == 1
    return np.where(decodes & (np.cumsum(decodes) > -(-len(slots) // num_stages)), 0, pending)


def within(budget: int, pending: np.ndarray) -> np.ndarray:
    """As much of `pending` as the budget allows: rows with one token to compute first, so that a long prefill
    does not hold up the others' decodes, then the rest in order."""
    if int(pending.sum()) <= budget:
        return pending
    singles = _in_order(budget, np.where(pending == 1, 1, 0))
    chunks = _in_order(budget - int(singles.sum()), np.where(pending == 1, 0, pending))
    return (singles + chunks).astype(np.int32)


def _in_order(budget: int, pending: np.ndarray) -> np.ndarray:
    return np.clip(budget - (np.cumsum(pending) - pending), 0, pending)
