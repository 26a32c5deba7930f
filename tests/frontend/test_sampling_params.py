"""A bad parameter is refused when it is given, in one line that names it and its limit."""

from __future__ import annotations

import pytest

from stepahead.errors import InvalidRequestError
from stepahead.frontend.sampling_params import SamplingParams

BAD = [
    ("temperature", -0.1, "at least 0"),
    ("temperature", float("nan"), "finite"),
    ("temperature", "hot", "finite number"),
    ("temperature", True, "finite number"),
    ("temperature", 10**400, "finite number"),
    ("temperature", 1e38, "at most 1000000"),
    ("top_p", 0, "above 0 and at most 1"),
    ("top_p", 1.01, "at most 1"),
    ("top_k", -2, "at least -1"),
    ("top_k", 1.5, "whole number"),
    ("min_p", 1.5, "at most 1"),
    ("n", 0, "at least 1"),
    ("n", 16385, "at most 16384"),
    ("seed", -2, "at least 0"),
    ("seed", 2**63, "at most"),
    ("presence_penalty", 2.1, "at most 2"),
    ("frequency_penalty", -2.1, "at least -2"),
    ("repetition_penalty", 0, "at least 1e-06"),
    ("repetition_penalty", 1e-46, "at least 1e-06"),
    ("repetition_penalty", 1e39, "at most 1000000"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -3, "at least 1"),
    ("max_tokens", 2.0, "whole number"),
    ("min_tokens", 17, "max_tokens=16"),
    ("min_tokens", -1, "at least 0"),
    ("logprobs", -2, "at least -1"),
    ("prompt_logprobs", -2, "at least -1"),
    ("stop", "", "empty string"),
    ("stop", ["a", ""], "empty string"),
    ("stop", [3], "strings"),
    ("stop_token_ids", 3, "list of token ids"),
    ("stop_token_ids", ["a"], "token ids"),
    ("bad_words", [" "], "empty string"),
    ("bad_words", "word", "list of strings"),
    ("allowed_token_ids", [], "at least one"),
    ("logit_bias", [1], "dict"),
    ("logit_bias", {"1": 2.0}, "token ids"),
    ("logit_bias", {1: float("inf")}, "finite"),
    ("ignore_eos", 1, "True or False"),
    ("output_kind", "delta", "RequestOutputKind"),
]


@pytest.mark.parametrize(("name", "value", "limit"), BAD)
def test_a_bad_value_is_refused_with_its_name_and_limit(name, value, limit):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert limit in message
    assert "\n" not in message


def test_a_refusal_is_a_value_error():
    with pytest.raises(ValueError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)


def test_the_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)


def test_seed_minus_one_means_none():
    assert SamplingParams(seed=-1).seed is None


def test_several_greedy_sequences_are_refused():
    with pytest.raises(InvalidRequestError, match="n=2"):
        SamplingParams(n=2, temperature=0)


def test_stop_strings_need_detokenization():
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_limits_themselves_are_allowed():
    limits = {"top_p": 1, "top_k": -1, "min_p": 1, "presence_penalty": -2, "frequency_penalty": 2, "max_tokens": None}
    for values in (limits, {"seed": 2**63 - 2, "n": 2, "min_tokens": 16}, {"n": 16384, "temperature": 1e6}):
        params = SamplingParams(**values)
        assert {name: getattr(params, name) for name in values} == values
