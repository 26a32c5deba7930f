"""How the stages of a pipeline hand steps to each other, in the order of the device.

Stage s of S does for step M, as launched work and one after the other:

    1. s = 0:      take the tokens of earlier steps that step M reads (below)
    2. s > 0:      wait for the hidden states of step M from stage s - 1
    3. all:        compute its layers
    4. s < S - 1:  start sending the hidden states of step M to stage s + 1
    5. s = S - 1:  sample, and start sending the tokens of step M to stage 0
    6. s = 0:      start receiving the tokens of step M

Only stage 0 reads sampled tokens (the others get hidden states), and it waits for those of a step N when it comes to
the first step M > N that computes a row which step N sampled, or, so that little is kept, when S steps are
waiting. Until then a stage 0 with other rows to compute goes on.

Why nobody waits for ever. Call (M, s) the place where stage s works on step M, and order places by step, then stage.
Whoever waits at (M, s) waits for something that happens at an earlier place:
 - hidden states of M (2.) are sent at (M, s - 1);
 - tokens of N (1.) are sent at (N, S - 1), and N < M;
 - a sender keeps what it sent until the transfer has ended. At (M, s) it waits for transfers of step M - S or
   before: of hidden states, received at (M - S, s + 1), and of tokens, whose receipt was started at (M - S, 0).
So the earliest place that has not ended can always go on. It needs no help from the scheduler: a row that is
planned too early makes stage 0 wait, and nothing else. Each direction between two ranks is a process group of its own,
so a transfer that waits never stands before one that goes the other way. Since the receipt of tokens is started in
the step that samples them, nothing is under way between two ranks when the engine is idle.

Within a tensor-parallel group all ranks see the same plans and launch the same work in the same order, so the argument
holds with "stage" for the group; what rank t sends goes to rank t of the other stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.post_update import post_update
from .batch_state import BatchState
from .host_ring import Field, HostBuffer, HostUpload
from .messages import NewRequest, StepPlan
from .parallel import PipelineStage, Transfer


@dataclass
class SampledElsewhere:
    """A step whose tokens the last stage samples. number: of the step, counted here. slots: int32 [n], of its rows;
    num_sampled: int32 [n]. transfer: set by launched work."""

    number: int
    slots: np.ndarray
    num_sampled: np.ndarray
    transfer: Transfer | None = None


@dataclass(frozen=True)
class StagedTokens:
    """Tokens that a step takes. slots: int32 [n], -1 for rows that have a new owner since; num_sampled: int32 [n]."""

    step: SampledElsewhere
    slots: Field
    num_sampled: Field


class Pipeline:
    """One rank's end of its stage's links. hidden: width and dtype of what goes from stage to stage."""

    def __init__(
        self, stage: PipelineStage, hidden: tuple[int, torch.dtype], device: torch.device, num_slots: int
    ) -> None:
        self.stage = stage
        self._hidden = hidden
        self._device = device
        self._num_steps = 0
        self._sampled_at = np.full(num_slots, -1, np.int64)
        self._admitted_at = np.full(num_slots, -1, np.int64)
        self._awaited: deque[SampledElsewhere] = deque()
        self._hidden_sent: deque[Transfer] = deque()
        self._tokens_sent: deque[Transfer] = deque()

    # ---- main thread ----------------------------------------------------------------------------

    def stage_tokens(self, plan: StepPlan, buffer: HostBuffer) -> list[StagedTokens]:
        """What step `plan` must take before it computes; nothing on other stages than the first."""
        self._num_steps += 1
        if not self.stage.first:
            return []
        self._admit(plan.new_requests)
        newest = int(self._sampled_at[plan.slots].max(initial=-1))
        taken = []
        while self._awaited and (self._awaited[0].number <= newest or len(self._awaited) >= self.stage.size):
            step = self._awaited.popleft()
            # Their slots belong to others now, in whose rows nothing may be written.
            slots = np.where(self._admitted_at[step.slots] > step.number, -1, step.slots).astype(np.int32)
            taken.append(StagedTokens(step, buffer.add(slots), buffer.add(step.num_sampled)))
        return taken

    def await_tokens(self, plan: StepPlan) -> SampledElsewhere | None:
        """First stage, of the step that was staged last: what is to be received, None when no row samples."""
        if not (self.stage.first and plan.samples.any()):
            return None
        self._sampled_at[plan.slots[plan.samples]] = self._num_steps
        step = SampledElsewhere(self._num_steps, plan.slots, plan.samples.astype(np.int32))
        self._awaited.append(step)
        return step

    def _admit(self, requests: Sequence[NewRequest]) -> None:
        for request in requests:
            self._sampled_at[request.slot] = -1
            self._admitted_at[request.slot] = self._num_steps

    # ---- launched work --------------------------------------------------------------------------

    def take(self, staged: StagedTokens, batch: BatchState, upload: HostUpload) -> None:
        """Writes a step's tokens into the batch; num_computed has grown in that step already."""
        assert staged.step.transfer is not None
        tokens = staged.step.transfer.finish()
        nothing_computed = torch.zeros(len(tokens) + 1, dtype=torch.int32, device=self._device)
        post_update(
            upload[staged.slots], nothing_computed, tokens, upload[staged.num_sampled], None,
            batch.num_computed, batch.num_tokens, batch.all_token_ids, batch.last_sampled,
        )  # fmt: skip

    def receive_hidden(self, num_tokens: int) -> torch.Tensor | None:
        """[num_tokens, width] from the stage before; None on the first."""
        if self.stage.before is None:
            return None
        width, dtype = self._hidden
        return self.stage.before.receive(torch.empty((num_tokens, width), dtype=dtype, device=self._device)).finish()

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """hidden: [t, width], what this stage's layers made."""
        assert self.stage.after is not None
        _keep(self._hidden_sent, self.stage.after.send(hidden.contiguous()), self.stage.size)

    def receive_tokens(self, step: SampledElsewhere) -> None:
        """Starts it: `take` waits."""
        assert self.stage.tokens is not None
        tokens = torch.empty((len(step.slots), 1), dtype=torch.int32, device=self._device)
        step.transfer = self.stage.tokens.receive(tokens)

    def send_tokens(self, sampled: torch.Tensor) -> None:
        """sampled: int32 [n, 1], of a step in which some row samples."""
        assert self.stage.tokens is not None
        _keep(self._tokens_sent, self.stage.tokens.send(sampled), self.stage.size)


def _keep(sent: deque[Transfer], transfer: Transfer, most: int) -> None:
    """Holds what is being sent, and waits for what was sent more than `most` transfers ago."""
    sent.append(transfer)
    while len(sent) > most:
        sent.popleft().finish()
