"""Requests are checked against the model before anything is sent, and resolved to what a device can read."""

from __future__ import annotations

import numpy as np
import pytest

from fake_engine import fake_engine
from small_tokenizers import byte_level
from stepahead.errors import InvalidRequestError
from stepahead.frontend.sampling_params import SamplingParams


@pytest.fixture
def processor():
    engine = fake_engine(print, byte_level(), lambda request: [], max_logprobs=5)
    yield engine.requests
    engine.client.close()


@pytest.fixture
def no_tokenizer():
    engine = fake_engine(print, None, lambda request: [])
    yield engine.requests
    engine.client.close()


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", {}, ["empty"]),
        ([], {}, ["empty"]),
        ({"prompt_token_ids": []}, {}, ["empty"]),
        ({"prompt": ""}, {}, ["empty"]),
        ({"prompt": None}, {}, ["must be a string"]),
        ({"text": "a"}, {}, ["unknown key 'text'", "prompt, prompt_token_ids, cache_salt"]),
        (7, {}, ["must be a string, token ids"]),
        ([1, 600], {}, ["600", "0 to 599"]),
        ([1, -1], {}, ["-1", "0 to 599"]),
        ([1, 2.5], {}, ["2.5", "whole number"]),
        ([1] * 100, {}, ["100 tokens", "max_model_len=100"]),
        ("a\udcff", {}, ["prompt", "\\udcff", "character 1", "surrogate"]),
        ({"prompt": "a", "cache_salt": "\ud800"}, {}, ["cache_salt", "surrogate"]),
        ("a", {"bad_words": ["\ud800"]}, ["bad word", "surrogate"]),
        ("a", {"stop_token_ids": [600]}, ["stop_token_ids", "600"]),
        ("a", {"allowed_token_ids": [-1]}, ["allowed_token_ids", "-1"]),
        ("a", {"logit_bias": {600: 1.0}}, ["logit_bias", "600"]),
        ("a", {"logprobs": 6}, ["logprobs=6", "max_logprobs=5"]),
        ("a", {"logprobs": -1}, ["logprobs=-1", "max_logprobs=5"]),
        ("a", {"prompt_logprobs": 6}, ["prompt_logprobs=6", "max_logprobs=5"]),
    ],
)
def test_a_bad_request_is_refused_with_the_value_and_the_limit(processor, prompt, params, words):
    with pytest.raises(InvalidRequestError) as caught:
        processor.prepare(prompt, SamplingParams(**params))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("prompt", "params"), [("text", {}), ([1], {"stop": "x"}), ([1], {"bad_words": ["x"]})])
def test_what_needs_a_tokenizer_is_refused_without_one(no_tokenizer, prompt, params):
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        no_tokenizer.prepare(prompt, SamplingParams(**params))


def test_parameters_changed_after_construction_are_checked_again(processor):
    params = SamplingParams()
    params.top_p = 0.0
    with pytest.raises(InvalidRequestError, match="top_p"):
        processor.prepare("a", params)


@pytest.mark.parametrize("prompt", ["The sea", {"prompt": "The sea"}])
def test_text_is_tokenized(processor, prompt):
    prepared = processor.prepare(prompt, SamplingParams())
    assert prepared.prompt == "The sea"
    assert prepared.prompt_token_ids == byte_level().encode("The sea")
    (request,) = prepared.engine_requests
    assert request.prompt.dtype == np.int32
    assert request.prompt.tolist() == prepared.prompt_token_ids


@pytest.mark.parametrize("prompt", [[5, 6], (5, 6), {"prompt_token_ids": [5, 6]}, np.array([5, 6])])
def test_token_ids_are_taken_as_they_are(processor, prompt):
    assert processor.prepare(prompt, SamplingParams()).prompt_token_ids == [5, 6]


def test_max_tokens_is_bounded_by_the_room_that_the_prompt_leaves(processor):
    for asked, expected in ((None, 90), (500, 90), (7, 7)):
        (request,) = processor.prepare([5] * 10, SamplingParams(max_tokens=asked)).engine_requests
        assert request.max_tokens == expected


def test_min_tokens_is_bounded_by_the_room_that_the_prompt_leaves(processor):
    params = SamplingParams(max_tokens=None, min_tokens=2**40)
    (request,) = processor.prepare([5] * 10, params).engine_requests
    assert request.options.min_tokens == 90


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1])
def test_a_priority_that_no_column_holds_is_refused(processor, priority):
    with pytest.raises(InvalidRequestError, match=f"priority={priority}"):
        processor.prepare("a", SamplingParams(), priority)


def test_stop_ids_are_the_users_and_the_models_unless_eos_is_ignored(processor):
    def stop_ids(**params):
        return processor.prepare("a", SamplingParams(**params)).engine_requests[0].options.stop_token_ids

    assert stop_ids() == [2]
    assert stop_ids(stop_token_ids=[9, 7]) == [2, 7, 9]
    assert stop_ids(stop_token_ids=[9], ignore_eos=True) == [9]


def test_sequences_have_consecutive_seeds_and_own_ids(processor):
    requests = processor.prepare("a", SamplingParams(n=3, seed=40, prompt_logprobs=1)).engine_requests
    assert [request.options.seed for request in requests] == [40, 41, 42]
    assert len({request.request_id for request in requests}) == 3
    assert [request.options.prompt_logprobs for request in requests] == [1, None, None]


def test_requests_without_a_seed_get_different_ones_that_the_engines_seed_repeats():
    def seeds(seed):
        engine = fake_engine(print, None, lambda request: [], seed=seed)
        engine.client.close()
        return [engine.requests.prepare([1], SamplingParams()).engine_requests[0].options.seed for _ in range(3)]

    assert len(set(seeds(0))) == 3
    assert seeds(0) == seeds(0)
    assert seeds(0) != seeds(1)


def test_greedy_requests_carry_no_filters(processor):
    params = SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.1)
    options = processor.prepare("a", params).engine_requests[0].options
    assert (options.temperature, options.top_k, options.top_p, options.min_p) == (0.0, 0, 1.0, 0.0)


def test_top_k_minus_one_keeps_all(processor):
    assert processor.prepare("a", SamplingParams(top_k=-1)).engine_requests[0].options.top_k == 0


def test_bad_words_are_meant_at_the_start_and_after_a_space(processor):
    tokenizer = byte_level()
    options = processor.prepare("a", SamplingParams(bad_words=["sea"])).engine_requests[0].options
    assert options.bad_words == [tokenizer.encode("sea"), tokenizer.encode(" sea")]


def test_priority_and_salt_travel(processor):
    prepared = processor.prepare({"prompt": "a", "cache_salt": "tenant"}, SamplingParams(), priority=3)
    (request,) = prepared.engine_requests
    assert (request.priority, request.cache_salt) == (3, "tenant")
