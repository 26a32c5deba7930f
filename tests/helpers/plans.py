"""Plans by hand: one request that prefills three tokens and then decodes."""

from __future__ import annotations

import numpy as np

from stepahead.worker.messages import NewRequest, SamplingOptions, StepPlan

PROMPT = (1, 2, 3)


def plan(step_id: int) -> StepPlan:
    """Step 0 admits the request into slot 0, every later one decodes a token of it."""
    none = np.empty(0, np.int32)
    prompt = np.array(PROMPT, np.int32)
    new = NewRequest(0, prompt, len(PROMPT), 0, np.array([0], np.int32), SamplingOptions(seed=0, temperature=0.0))
    return StepPlan(
        step_id=step_id,
        new_requests=[new] if step_id == 0 else [],
        append_slots=none,
        append_blocks=none,
        append_index=none,
        slots=np.array([0], np.int32),
        num_query=np.array([len(PROMPT) if step_id == 0 else 1], np.int32),
        samples=np.array([True]),
        num_drafts=none,
        max_seq_len=len(PROMPT) + step_id,
    )
