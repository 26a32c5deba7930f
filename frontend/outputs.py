"""What a user gets back, by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Logprob:
    """logprob: natural log. rank: 1 for the most likely token. decoded_token: its text in the middle of a text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""By token id: the chosen token first, then the most likely ones."""


@dataclass
class CompletionOutput:
    """One generated sequence.

    text: what follows the prompt's text (its leading space included). token_ids: all sampled tokens, the one
    that ended it included. cumulative_logprob: sum over token_ids; None unless logprobs were asked for.
    finish_reason: None while it runs, then "stop", "length" or "abort". stop_reason: the stop string or
    stop token id that ended it; None for the model's own end of text.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Seconds on the clock of time.monotonic(). The token times are when the front end received them."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None


@dataclass
class RequestOutput:
    """A request's prompt and its n sequences.

    prompt: its text; None when it was given as token ids. prompt_logprobs: per prompt position, None for the
    first; None unless asked for. num_cached_tokens: prompt tokens whose KV came from the prefix cache; None while
    it runs, and when a stop string ended it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
