"""Log-probabilities are those of the raw logits, for each row as many as it asked for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from step_driver import StepDriver, context_logits, greedy_tokens, hash_model
from stepahead.worker import logprobs
from stepahead.worker.messages import Logprobs, SamplingOptions

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture
def driver() -> Iterator[StepDriver]:
    driver = StepDriver()
    yield driver
    driver.close()


def given(**options: object) -> SamplingOptions:
    return SamplingOptions(**{"seed": 11, "temperature": 0.0, **options})  # type: ignore[arg-type]


def check_row(values: Logprobs, row: int, logits: torch.Tensor, token: int, k: int) -> None:
    """logits: float32 [vocab]. The first 1 + k columns of `row` are right for `token`."""
    expected = logits.log_softmax(0)
    top = expected.topk(k)
    assert values.token_ids[row, : 1 + k].tolist() == [token, *top.indices.tolist()]
    np.testing.assert_allclose(values.logprobs[row, : 1 + k], [expected[token], *top.values], rtol=1e-6)
    assert values.ranks[row] == 1 + int((expected > expected[token]).sum())


def test_each_row_gets_as_many_as_it_asked_for_and_the_chosen_token(driver: StepDriver) -> None:
    asked = {"none": None, "three": 3, "only the chosen": 0, "five": 5}
    for slot, (name, k) in enumerate(asked.items()):
        driver.admit(slot, name, [slot, *PROMPT], given(temperature=1.0, logprobs=k))
    driver.run(5)
    model = hash_model()
    for step, output in enumerate(driver.outputs):
        assert output.logprobs is not None
        assert output.logprobs.token_ids.shape == (4, 6)
        for row, (name, k) in enumerate(asked.items()):
            context = [row, *PROMPT, *driver.tokens[name][:step]]
            if k is None:
                assert not output.logprobs.token_ids[row].any()
            else:
                logits = context_logits(model, context)[-1]
                check_row(output.logprobs, row, logits, driver.tokens[name][step], k)


def test_they_are_taken_before_any_processor_changes_the_logits(driver: StepDriver) -> None:
    options = given(logprobs=2, allowed_token_ids=[7], logit_bias={7: 50.0}, repetition_penalty=2.0)
    driver.admit(0, "a", PROMPT, options)
    driver.run(2)
    first = driver.outputs[0].logprobs
    assert first is not None
    check_row(first, 0, context_logits(hash_model(), PROMPT)[-1], 7, 2)


def test_rows_that_do_not_sample_have_none(driver: StepDriver) -> None:
    driver.admit(0, "a", PROMPT, given(logprobs=2))
    driver.start({0: 4})
    assert driver.finish().logprobs is None


@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_prompt_tokens_are_scored_once_each_in_any_chunking(driver: StepDriver, chunk: int) -> None:
    row = driver.admit(2, "a", PROMPT, given(prompt_logprobs=3))
    driver.admit(4, "b", [1])
    while row.num_computed < len(PROMPT):
        driver.start({4: 1, 2: min(chunk, len(PROMPT) - row.num_computed)})
        driver.finish()
    driver.run(2)
    logits, expected_first = context_logits(hash_model(), PROMPT), 1
    for output in driver.outputs:
        for part in output.prompt_logprobs:
            assert part.row == 1
            assert part.first == expected_first
            for i in range(len(part.values.ranks)):
                position = part.first + i
                check_row(part.values, i, logits[position - 1], PROMPT[position], 3)
            expected_first += len(part.values.ranks)
    assert expected_first == len(PROMPT)
    assert driver.tokens["a"] == greedy_tokens(PROMPT, 3)


def test_rows_of_one_step_keep_their_own_prompt_scores(driver: StepDriver) -> None:
    prompts = {0: PROMPT, 1: [8, 8], 2: [44], 3: PROMPT[::-1]}
    asks = {0: 2, 1: 5, 2: 5, 3: None}
    for slot, prompt in prompts.items():
        driver.admit(slot, str(slot), prompt, given(prompt_logprobs=asks[slot]))
    driver.run(1)
    parts = driver.outputs[0].prompt_logprobs
    assert [(p.row, p.first, len(p.values.ranks)) for p in parts] == [(0, 1, 9), (1, 1, 1)]
    check_row(parts[1].values, 0, context_logits(hash_model(), [8, 8])[0], 8, 5)


def test_sampled_tokens_are_not_scored_as_prompt_when_a_request_comes_again(driver: StepDriver) -> None:
    driver.admit(0, "a", [*PROMPT, 50, 51, 52], given(prompt_logprobs=0), num_prompt=len(PROMPT))
    driver.run(1)
    (part,) = driver.outputs[0].prompt_logprobs
    assert (part.first, len(part.values.ranks)) == (1, len(PROMPT) - 1)


def test_slices_that_bound_memory_give_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, index, targets = torch.randn(9, 4), torch.arange(2, 9), torch.arange(7, dtype=torch.int32)
    weight = torch.randn(30, 4)

    def score() -> logprobs.DeviceLogprobs:
        return logprobs.prompt_logprobs(lambda h: h @ weight.T, hidden, index, targets, 3, 30)

    whole = score()
    monkeypatch.setattr(logprobs, "_SLICE_ELEMENTS", 75)
    sliced = score()
    assert torch.equal(sliced.token_ids, whole.token_ids)
    assert torch.allclose(sliced.logprobs, whole.logprobs)
    assert torch.equal(sliced.ranks, whole.ranks)
