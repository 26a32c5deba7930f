"""Drives an EngineCore through a story of arrivals and aborts, and collects what a client would see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stepahead.engine_core.engine import EngineCore
from stepahead.engine_core.messages import EngineRequest, FinishedRequest
from stepahead.worker.messages import SamplingOptions


@dataclass(frozen=True)
class Story:
    """One request: when it comes (in turns of the loop), what it asks, when its client leaves it.

    early: the abort arrives while a step runs, as from the input thread.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    arrives: int = 0
    leaves: int | None = None
    early: bool = False
    temperature: float = 0.0
    seed: int = 0
    salt: str = ""

    def message(self, request_id: int) -> EngineRequest:
        options = SamplingOptions(seed=self.seed, temperature=self.temperature, stop_token_ids=list(self.stop_ids))
        return EngineRequest(
            request_id=request_id,
            prompt=np.array(self.prompt, np.int32),
            options=options,
            max_tokens=self.max_tokens,
            priority=self.priority,
            cache_salt=self.salt,
        )


@dataclass
class Seen:
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[int, FinishedRequest] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)


def play(engine: EngineCore, stories: Sequence[Story], max_turns: int = 20_000) -> Seen:
    seen, turn, started = Seen(), 0, set()
    while len(started) < len(stories) or engine.has_work():
        assert turn < max_turns, "the engine makes no progress"
        for request_id, story in enumerate(stories):
            if request_id not in started and (story.arrives == turn or not engine.has_work()):
                started.add(request_id)
                refusal = engine.add_request(story.message(request_id))
                if refusal is not None:
                    seen.finished[request_id] = refusal
            gone = request_id in seen.finished or request_id in seen.aborted
            if request_id in started and not gone and story.leaves is not None and turn >= story.leaves:
                seen.aborted.add(request_id)
                if story.early:
                    engine.early_aborts.append(request_id)
                else:
                    engine.abort_requests([request_id])
        _take(engine, seen)
        turn += 1
    engine.abort_requests(list(engine.early_aborts))
    return seen


def _take(engine: EngineCore, seen: Seen) -> None:
    batch = engine.step()
    if batch is None:
        return
    assert batch.counts.sum() == len(batch.tokens)
    for request_id, token in zip(
        np.repeat(batch.request_ids, batch.counts).tolist(), batch.tokens.tolist(), strict=True
    ):
        assert request_id not in seen.finished, "a token came after the end"
        assert request_id not in seen.aborted or engine.early_aborts, "a token came after the abort"
        seen.tokens[request_id].append(token)
    for finished in batch.finished:
        assert finished.request_id not in seen.finished, "a request finished twice"
        seen.finished[finished.request_id] = finished
