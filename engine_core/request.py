"""One request as the engine core sees it, from arrival to its last token."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from ..worker.messages import Logprobs
from .block_pool import block_digest, root_digest
from .messages import EngineRequest


class State(enum.Enum):
    """WAITING: no slot. RUNNING: in a slot, scheduled. DRAINING: preempted, its blocks given up, in its
    slot only until the tokens in flight have landed. FINISHED: gone."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    DRAINING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False, slots=True)
class Request:
    """arrival: order among all requests; a preempted request keeps it.
    tokens: int32 [num_tokens], all known tokens while the request waits (in a slot, the table has them).
    digests: block keys of the full blocks of known tokens, as far as they were needed.
    num_cached_tokens: prompt tokens found in the prefix cache at the first admission; -1 before it.
    prompt_logprobs: what the chunks computed so far have brought, until it is sent with the first token.
    """

    message: EngineRequest
    arrival: int
    tokens: np.ndarray
    structured: bool = False
    state: State = State.WAITING
    slot: int = -1
    digests: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = -1
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs_sent: bool = False

    @property
    def request_id(self) -> int:
        return self.message.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.message.prompt)

    @property
    def owes_prompt_logprobs(self) -> bool:
        return self.message.options.prompt_logprobs is not None and not self.prompt_logprobs_sent

    def extend_digests(self, tokens: np.ndarray, num_blocks: int, block_size: int) -> None:
        """Makes the first num_blocks keys known. tokens: int32, at least num_blocks * block_size."""
        parent = self.digests[-1] if self.digests else root_digest(self.message.cache_salt)
        for index in range(len(self.digests), num_blocks):
            parent = block_digest(parent, tokens[index * block_size : (index + 1) * block_size])
            self.digests.append(parent)
