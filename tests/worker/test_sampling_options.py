"""Each sampling option does what transformers' processor of that name does, two steps in flight, in any mix.

The oracle runs a request alone, in plain Python over the list of its tokens, which is never late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from step_driver import VOCAB_SIZE, StepDriver, context_logits, hash_model
from stepahead.kernels.gumbel_sample import gumbel_sample
from stepahead.worker.messages import SamplingOptions

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
STEPS = 24
MINUS_INF = float("-inf")
LIKELY = dict.fromkeys(range(0, 20, 2), 6.0) | {1: -9.0, 3: -3.5}
"""A bias that lifts ten tokens above all others, so that they come often, and makes some logits negative."""


def penalized(logits: torch.Tensor, tokens: Sequence[int], options: SamplingOptions) -> torch.Tensor:
    """vLLM's three penalties for one row: float32 [1, vocab]."""
    if options.repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)(torch.tensor([tokens]), logits)
    counts = torch.bincount(torch.tensor(tokens[len(PROMPT) :], dtype=torch.long), minlength=VOCAB_SIZE)
    logits = logits - options.frequency_penalty * counts
    return logits - options.presence_penalty * (counts > 0)


def processed(logits: torch.Tensor, tokens: list[int], options: SamplingOptions) -> torch.Tensor:
    """logits: float32 [1, vocab]. In vLLM's order, up to the temperature."""
    ids = torch.tensor([tokens])
    if options.allowed_token_ids is not None:
        banned = [i for i in range(VOCAB_SIZE) if i not in options.allowed_token_ids]
        logits[0, banned] = MINUS_INF
    if options.bad_words:
        logits = NoBadWordsLogitsProcessor(options.bad_words)(ids, logits)
    if len(tokens) - len(PROMPT) < options.min_tokens:
        logits[0, options.stop_token_ids] = MINUS_INF
    if options.logit_bias:
        logits = SequenceBiasLogitsProcessor([[[i], b] for i, b in options.logit_bias.items()])(ids, logits)
    return penalized(logits, tokens, options)


def truncated(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    logits = TemperatureLogitsWarper(options.temperature)(None, logits)
    if options.min_p > 0:
        logits = MinPLogitsWarper(options.min_p)(None, logits)
    if options.top_k > 0:
        logits = TopKLogitsWarper(options.top_k)(None, logits)
    if options.top_p < 1:
        logits = TopPLogitsWarper(options.top_p)(None, logits)
    return logits


def oracle(options: SamplingOptions, steps: int = STEPS) -> list[int]:
    tokens, model = list(PROMPT), hash_model()
    for _ in range(steps):
        logits = processed(context_logits(model, tokens)[-1:].clone(), tokens, options)
        if options.temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        seed, position = torch.tensor([options.seed]), torch.tensor([len(tokens)])
        tokens.append(int(gumbel_sample(truncated(logits, options), torch.ones(1), seed, position)))
    return tokens[len(PROMPT) :]


def given(**options: object) -> SamplingOptions:
    return SamplingOptions(**{"seed": 11, "temperature": 0.0, **options})  # type: ignore[arg-type]


CASES = {
    "greedy": given(),
    "temperature": given(temperature=0.7),
    "another seed": given(temperature=0.7, seed=2**63 - 1),
    "top_k": given(temperature=1.0, top_k=3),
    "top_k of all": given(temperature=1.0, top_k=VOCAB_SIZE + 5),
    "top_p": given(temperature=1.3, top_p=0.6),
    "min_p": given(temperature=1.0, min_p=0.2),
    "all three": given(temperature=0.9, top_k=20, top_p=0.8, min_p=0.05),
    "repetition": given(repetition_penalty=1.7, logit_bias=LIKELY),
    "presence": given(presence_penalty=2.5, logit_bias=LIKELY),
    "frequency": given(frequency_penalty=1.5, logit_bias=LIKELY),
    "negative penalties": given(repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=-0.5),
    "logit_bias": given(logit_bias={7: 5.0, 8: -100.0, 96: 4.5}),
    "allowed": given(allowed_token_ids=[0, 31, 32, 63, 64, 96]),
    "allowed, random": given(temperature=2.0, allowed_token_ids=[5, 6, 7]),
    "bad words": given(allowed_token_ids=[1, 2, 3], bad_words=[[1, 2], [2, 3, 1], [3, 3, 3, 3], [2, 2]]),
    "one bad word": given(allowed_token_ids=list(range(12)), bad_words=[[4], [6], [5, 4]]),
    "bad word that ends the prompt": given(allowed_token_ids=[1, 7], bad_words=[[2, 6, 1], [9, 6, 7]]),
    "min_tokens": given(allowed_token_ids=[1, 2, 3, 4], min_tokens=9, stop_token_ids=[2, 4, 3]),
    "everything": given(
        temperature=0.8, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.4,
        frequency_penalty=0.3, logit_bias=LIKELY, allowed_token_ids=list(range(40)), bad_words=[[0], [2, 4], [6, 8]],
        min_tokens=7, stop_token_ids=[10, 12],
    ),
}  # fmt: skip


@pytest.fixture
def driver() -> Iterator[StepDriver]:
    driver = StepDriver()
    yield driver
    driver.close()


@pytest.mark.parametrize("name", CASES)
def test_an_option_does_what_the_oracle_does(driver: StepDriver, name: str) -> None:
    driver.admit(3, name, PROMPT, CASES[name])
    driver.run(STEPS)
    assert driver.tokens[name] == oracle(CASES[name])


@pytest.mark.parametrize("seed", range(4))
def test_rows_with_and_without_options_do_not_touch_each_other(driver: StepDriver, seed: int) -> None:
    """Random mixes; requests come and go, so slots change between options that have lists and that do not."""
    rng = np.random.default_rng(seed)
    names = [*rng.permutation(list(CASES)), *rng.permutation(list(CASES))]
    ends: dict[int, int] = {}
    expected: dict[str, int] = {}
    for step in range(80):
        for slot in [s for s, end in ends.items() if end == step]:
            driver.free(slot)
            del ends[slot]
        if names and len(ends) < 6 and rng.random() < 0.5:
            slot = int(rng.choice([s for s in range(8) if s not in ends]))
            case = names.pop()
            length = int(rng.integers(3, STEPS))
            ends[slot] = step + length
            name = f"{case}/{step}"
            expected[name] = length
            driver.admit(slot, name, PROMPT, CASES[case])
        if ends:
            driver.start()
        if len(driver.in_flight) == 2:
            driver.finish()
    driver.drain()
    assert len(expected) > 12
    for name in expected:
        assert driver.tokens[name] == oracle(CASES[name.split("/")[0]], len(driver.tokens[name])), name


@pytest.mark.parametrize("name", ["repetition", "frequency", "min_tokens", "bad words", "everything"])
def test_a_request_admitted_again_is_sampled_as_if_it_had_never_left(driver: StepDriver, name: str) -> None:
    tokens = oracle(CASES[name])
    driver.admit(0, "again", PROMPT + tokens[:6], CASES[name], num_prompt=len(PROMPT))
    driver.admit(1, "other", PROMPT)
    driver.run(STEPS - 6)
    assert driver.tokens["again"] == tokens[6:]


def test_a_rows_options_do_not_outlive_it(driver: StepDriver) -> None:
    driver.admit(0, "everything", PROMPT, CASES["everything"])
    driver.run(4)
    driver.free(0)
    driver.admit(0, "greedy", PROMPT)
    driver.run(6)
    assert driver.tokens["greedy"] == oracle(given(), 6)


def test_token_ids_that_do_not_exist_are_ignored(driver: StepDriver) -> None:
    options = given(
        min_tokens=9, stop_token_ids=[-1, VOCAB_SIZE, 10**9], bad_words=[[VOCAB_SIZE], [1, -5], []],
        logit_bias={VOCAB_SIZE: 5.0}, top_k=-1,
    )  # fmt: skip
    driver.admit(0, "odd", PROMPT, options)
    driver.run(8)
    assert driver.tokens["odd"] == oracle(given(), 8)


def test_a_temperature_too_small_to_divide_by_is_greedy(driver: StepDriver) -> None:
    driver.admit(0, "cold", PROMPT, given(temperature=1e-38, top_p=0.5))
    driver.run(8)
    assert driver.tokens["cold"] == oracle(given(), 8)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
def test_every_64_bit_seed_is_accepted(driver: StepDriver, seed: int) -> None:
    driver.admit(0, "seeded", PROMPT, given(temperature=1.0, seed=seed))
    driver.run(3)
    assert len(driver.tokens["seeded"]) == 3
