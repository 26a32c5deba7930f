"""Prompts and SamplingParams, checked against the model, to the requests that the engine takes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
import numpy as np

from ..config import ResolvedConfig
from ..engine_core.messages import EngineInfo, EngineRequest
from ..errors import InvalidRequestError
from ..worker.messages import SamplingOptions
from .sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the dicts may hold "cache_salt"."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_PRIORITIES = 2**63


@dataclass
class PreparedRequest:
    """A user's request that passed every check. engine_requests: one per sequence (params.n)."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    engine_requests: list[EngineRequest]


@dataclass
class _ParsedPrompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str


class RequestProcessor:
    """tokenizer: None when the user skipped it; then prompts are token ids and stop strings are refused."""

    def __init__(self, config: ResolvedConfig, info: EngineInfo, tokenizer: Any | None) -> None:
        self._vocab_size = config.model.vocab_size
        self._eos_token_ids = config.model.eos_token_ids
        self._max_logprobs = config.settings.max_logprobs
        self._max_model_len = info.max_model_len
        self._max_model_len_from = info.max_model_len_from
        self._tokenizer = tokenizer
        self._seeds = random.Random(config.settings.seed)
        self._request_ids = count()

    def prepare(
        self, prompt: Prompt, params: SamplingParams, priority: int = 0, add_special_tokens: bool = True
    ) -> PreparedRequest:
        """Checks everything before anything is sent. Raises: InvalidRequestError naming the value and the limit."""
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling_params={params!r}: must be a SamplingParams")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority={priority!r}: must be a whole number")
        if not -_PRIORITIES <= priority < _PRIORITIES:
            raise InvalidRequestError(f"priority={priority}: must be from -2**63 to 2**63 - 1")
        params.verify()
        parsed = self._parse(prompt, add_special_tokens)
        num_prompt = self._check_length(len(parsed.token_ids))
        room = self._max_model_len - num_prompt
        options = self._options(params, room)
        tokens = np.asarray(parsed.token_ids, np.int32)
        requests = []
        for index in range(params.n):
            own = self._options_of_sequence(options, params, index)
            requests.append(
                EngineRequest(
                    request_id=next(self._request_ids),
                    prompt=tokens,
                    options=own,
                    max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                    priority=priority,
                    cache_salt=parsed.cache_salt,
                )
            )
        return PreparedRequest(parsed.text, parsed.token_ids, params, requests)

    def _parse(self, prompt: Prompt, add_special_tokens: bool) -> _ParsedPrompt:
        salt = ""
        text: Any = None
        ids: Any = None
        if isinstance(prompt, Mapping):
            unknown = [key for key in prompt if key not in _PROMPT_KEYS]
            if unknown:
                raise InvalidRequestError(f"prompt has unknown key {unknown[0]!r}; known: {', '.join(_PROMPT_KEYS)}")
            text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt") or ""
            if not isinstance(salt, str):
                raise InvalidRequestError(f"cache_salt={salt!r}: must be a string")
            check_text("cache_salt", salt)
        elif isinstance(prompt, str):
            text = prompt
        else:
            ids = prompt
        if ids is None:
            if not isinstance(text, str):
                raise InvalidRequestError(f"prompt={prompt!r}: must be a string, token ids, or a dict with one of them")
            ids = self._encode(text, add_special_tokens) if text else []
        return _ParsedPrompt(text, self._check_prompt_ids(ids), salt)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError("a text prompt needs a tokenizer (skip_tokenizer_init=True): give token ids")
        check_text("prompt or bad word", text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_prompt_ids(self, ids: Any) -> list[int]:
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        if not isinstance(ids, (list, tuple, range)):
            raise InvalidRequestError(f"prompt={ids!r}: must be a string, token ids, or a dict with one of them")
        if not ids:
            raise InvalidRequestError("the prompt is empty: it must hold at least one token")
        self._check_ids("prompt", ids)
        return list(ids)

    def _check_ids(self, name: str, ids: Iterable[Any]) -> None:
        size = self._vocab_size
        for token_id in ids:
            if type(token_id) is not int:
                raise InvalidRequestError(f"{name}: token id {token_id!r} is not a whole number")
            if not 0 <= token_id < size:
                raise InvalidRequestError(f"{name}: token id {token_id} is out of range: the model has 0 to {size - 1}")

    def _check_length(self, num_prompt: int) -> int:
        if num_prompt >= self._max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens: with one token to generate it exceeds "
                f"max_model_len={self._max_model_len} (limited by {self._max_model_len_from})"
            )
        return num_prompt

    def _options(self, params: SamplingParams, room: int) -> SamplingOptions:
        """What all sequences of a request share. A greedy one needs no filters: its maximum is in any of them.

        room: tokens it can generate at most.
        """
        if params.stop_strings and self._tokenizer is None:
            raise InvalidRequestError(f"stop={params.stop!r}: stop strings need a tokenizer")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._check_ids(name, getattr(params, name) or ())
        stops = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops.update(self._eos_token_ids)
        return SamplingOptions(
            seed=0,
            temperature=0.0 if params.greedy else float(params.temperature),
            top_k=0 if params.greedy or params.top_k == -1 else min(params.top_k, self._vocab_size),
            top_p=1.0 if params.greedy else float(params.top_p),
            min_p=0.0 if params.greedy else float(params.min_p),
            repetition_penalty=float(params.repetition_penalty),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            min_tokens=min(params.min_tokens, room),
            stop_token_ids=sorted(stops),
            logit_bias={token_id: float(bias) for token_id, bias in (params.logit_bias or {}).items()},
            allowed_token_ids=None if params.allowed_token_ids is None else sorted(set(params.allowed_token_ids)),
            bad_words=self._bad_words(params.bad_words or ()),
            logprobs=self._num_logprobs("logprobs", params.logprobs),
            prompt_logprobs=self._num_logprobs("prompt_logprobs", params.prompt_logprobs),
        )

    def _options_of_sequence(self, options: SamplingOptions, params: SamplingParams, index: int) -> SamplingOptions:
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed + index
        changes: dict[str, Any] = {"seed": seed}
        if index > 0:
            changes["prompt_logprobs"] = None  # the same for all sequences: the first one reports them
        return msgspec.structs.replace(options, **changes)

    def _num_logprobs(self, name: str, asked: int | None) -> int | None:
        if asked is None:
            return None
        wanted = self._vocab_size if asked == -1 else asked
        if wanted > self._max_logprobs:
            raise InvalidRequestError(f"{name}={asked}: must be at most max_logprobs={self._max_logprobs}")
        return min(wanted, self._vocab_size)

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Each word as token ids, at the start of a text and after a space."""
        if words and self._tokenizer is None:
            raise InvalidRequestError(f"bad_words={list(words)!r}: needs a tokenizer")
        found: list[list[int]] = []
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = self._encode(text, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found


def check_text(what: str, text: str) -> None:
    """A str may hold half a surrogate pair: a command line that was not UTF-8 does. No tokenizer takes it.

    Raises: InvalidRequestError.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{what} {text!r:.80}: character {error.start} is half a surrogate pair, which is no text"
        ) from None
