"""What a user says about sampling, by vLLM's names and with vLLM's meaning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from ..errors import InvalidRequestError

_GREEDY_BELOW = 1e-5
_MAX_SEED = 2**63 - 1
_MAX_N = 16384
"""Each is a request of its own to the engine."""
_EXTREME = 1e6
"""Far more than anyone means, and far less than makes float32 logits overflow: an infinity times 0, or less another,
is no number, and no mask holds it back."""


class RequestOutputKind(Enum):
    """What each output of a stream holds. LLM.generate always returns everything."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends.

    n: sequences per prompt, 16384 at most; the i-th uses seed + i. temperature: 0 takes the most likely token.
    top_k: 0 and -1 keep all. min_p: drops tokens less likely than min_p times the most likely one.
    seed: None draws one from the engine's generator (setting `seed`), so a program that submits the same
    requests in the same order gets the same tokens. presence_penalty, frequency_penalty: over the output;
    repetition_penalty: over prompt and output. stop: strings that end the text; they are cut off unless
    include_stop_str_in_output. stop_token_ids: ids that end it, besides the model's end-of-text ids
    (which ignore_eos leaves out). bad_words: texts that may not appear. max_tokens: None for as many
    as fit in max_model_len. min_tokens: no end before this many. logprobs: how many likely tokens to
    report at each position besides the chosen one (-1 for the whole vocabulary); prompt_logprobs likewise
    for the prompt. logit_bias: added to the logits of token ids. allowed_token_ids: nothing else is sampled.
    detokenize: False leaves the text empty.

    Raises: InvalidRequestError naming the value and its limit.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        self.verify()

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def verify(self) -> None:
        """Checks every field alone and against the others. Raises: InvalidRequestError."""
        _check_float("temperature", self.temperature, 0, _EXTREME)
        _check_float("top_p", self.top_p, 0, 1, above=True)
        _check_float("min_p", self.min_p, 0, 1)
        _check_float("presence_penalty", self.presence_penalty, -2, 2)
        _check_float("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_float("repetition_penalty", self.repetition_penalty, 1 / _EXTREME, _EXTREME)
        _check_int("n", self.n, 1)
        if self.n > _MAX_N:
            raise InvalidRequestError(f"n={self.n}: must be at most {_MAX_N}")
        _check_int("top_k", self.top_k, -1)
        _check_int("min_tokens", self.min_tokens, 0)
        for name, least in (("max_tokens", 1), ("logprobs", -1), ("prompt_logprobs", -1), ("seed", 0)):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), least)
        if self.seed is not None and self.seed + self.n - 1 > _MAX_SEED:
            raise InvalidRequestError(f"seed={self.seed}: with n={self.n} must be at most {_MAX_SEED - self.n + 1}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens={self.min_tokens}: must not exceed max_tokens={self.max_tokens}")
        if self.n > 1 and self.greedy:
            raise InvalidRequestError(f"n={self.n}: must be 1 at temperature 0, where all would be the same")
        self._verify_types()
        self._verify_stop()

    def _verify_types(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise InvalidRequestError(f"{field.name}={value!r}: must be True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequestError(f"output_kind={self.output_kind!r}: must be a RequestOutputKind")
        _check_items("stop_token_ids", self.stop_token_ids, int, "token ids")
        _check_items("allowed_token_ids", self.allowed_token_ids, int, "token ids")
        _check_items("bad_words", self.bad_words, str, "strings")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids=[]: must name at least one token id")
        if any(not word.strip() for word in self.bad_words or ()):
            raise InvalidRequestError(f"bad_words={self.bad_words!r}: must not hold an empty string")
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise InvalidRequestError(f"logit_bias={self.logit_bias!r}: must be a dict from token ids to numbers")
        _check_items("logit_bias", list(self.logit_bias), int, "token ids")
        for token_id, bias in self.logit_bias.items():
            _check_float(f"logit_bias[{token_id}]", bias, -math.inf, math.inf)

    def _verify_stop(self) -> None:
        if not isinstance(self.stop, str):
            _check_items("stop", self.stop, str, "strings")
        if "" in self.stop_strings:
            raise InvalidRequestError(f"stop={self.stop!r}: must not hold an empty string")
        if self.stop_strings and not self.detokenize:
            raise InvalidRequestError(f"stop={self.stop!r}: stop strings need detokenize=True")


def _check_float(name: str, value: Any, low: float, high: float, above: bool = False) -> None:
    """above: whether `low` itself is out of range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise InvalidRequestError(f"{name}={value!r}: must be a finite number")
    if low < value <= high or (value == low and not above):
        return
    limits = []
    if low != -math.inf:
        limits.append(f"above {low}" if above else f"at least {low}")
    if high != math.inf:
        limits.append(f"at most {high}")
    raise InvalidRequestError(f"{name}={value}: must be {' and '.join(limits)}")


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def _check_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name}={value!r}: must be a whole number")
    if value < least:
        raise InvalidRequestError(f"{name}={value}: must be at least {least}")


def _check_items(name: str, values: Sequence[Any] | None, kind: type, what: str) -> None:
    if values is None:
        return
    if not isinstance(values, (list, tuple)):
        raise InvalidRequestError(f"{name}={values!r}: must be a list of {what}")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidRequestError(f"{name}: {value!r} is not one of the {what} it must hold")
