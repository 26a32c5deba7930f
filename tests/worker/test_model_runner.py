"""Steps started before earlier ones have returned give what one forward over the whole context gives."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from step_driver import (
    GREEDY,
    NUM_SLOTS,
    StepDriver,
    context_logits,
    greedy_tokens,
    hash_model,
    make_config,
)
from stepahead.errors import StepaheadError
from stepahead.worker.attention import AttentionMetadata
from stepahead.worker.messages import GrammarMasks, SamplingOptions
from stepahead.worker.models.base import KVCache
from stepahead.worker.models.hash_lm import HashLM
from stepahead.worker.parallel import ParallelGroup

PROMPTS = {"a": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], "b": [27], "c": [2, 7, 1, 8, 2]}


@pytest.fixture
def driver() -> Iterator[StepDriver]:
    driver = StepDriver()
    yield driver
    driver.close()


def admit_all(driver: StepDriver) -> None:
    for slot, (name, prompt) in zip((5, 0, 2), PROMPTS.items(), strict=True):
        driver.admit(slot, name, prompt)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_row_continues_its_own_context(driver: StepDriver, depth: int) -> None:
    admit_all(driver)
    driver.run(20, depth)
    assert driver.tokens == {name: greedy_tokens(prompt, 20) for name, prompt in PROMPTS.items()}


def test_a_second_step_starts_before_the_first_has_run() -> None:
    driver, gate = StepDriver(), threading.Event()
    admit_all(driver)
    driver.device.launch(partial(gate.wait, 30))
    first, second = driver.start(), driver.start()
    assert not first.done()
    assert not second.done()
    gate.set()
    driver.drain()
    assert driver.tokens["a"] == greedy_tokens(PROMPTS["a"], 2)
    driver.close()


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_a_prompt_computed_in_chunks_gives_the_same_tokens_beside_running_decodes(
    driver: StepDriver, chunk: int
) -> None:
    driver.admit(1, "b", PROMPTS["b"])
    driver.run(3)
    row = driver.admit(4, "a", PROMPTS["a"])
    while row.num_computed < len(PROMPTS["a"]):
        driver.start({1: 1, 4: min(chunk, len(PROMPTS["a"]) - row.num_computed)})
        if len(driver.in_flight) == 2:
            driver.finish()
    driver.run(5)
    assert driver.tokens["a"] == greedy_tokens(PROMPTS["a"], 6)
    assert driver.tokens["b"] == greedy_tokens(PROMPTS["b"], len(driver.tokens["b"]))


def test_a_chunk_that_does_not_finish_its_prompt_samples_nothing(driver: StepDriver) -> None:
    driver.admit(0, "a", PROMPTS["a"])
    driver.start({0: 4})
    output = driver.finish()
    assert output.num_sampled.tolist() == [0]
    assert output.sampled.shape == (1, 1)


def test_a_slot_can_be_given_away_while_its_last_owner_is_still_running() -> None:
    driver = StepDriver(make_config(step_ms=5))
    driver.admit(3, "old", PROMPTS["a"])
    driver.admit(1, "other", PROMPTS["c"])
    driver.start()
    driver.start()
    driver.free(3)
    driver.admit(3, "new", PROMPTS["b"])
    driver.finish()
    driver.run(6)
    assert driver.tokens["old"] == greedy_tokens(PROMPTS["a"], 2)
    assert driver.tokens["new"] == greedy_tokens(PROMPTS["b"], 6)
    assert driver.tokens["other"] == greedy_tokens(PROMPTS["c"], 8)
    driver.close()


def test_rows_skipped_for_a_step_go_on_where_they_were(driver: StepDriver) -> None:
    admit_all(driver)
    driver.start()
    for slots in ([5], [0, 2], [2, 5], [0], [2, 0, 5], [5, 0, 2]):
        driver.start(dict.fromkeys(slots, 1))
        driver.finish()
    driver.drain()
    for name, prompt in PROMPTS.items():
        assert driver.tokens[name] == greedy_tokens(prompt, len(driver.tokens[name]))
    assert sum(map(len, driver.tokens.values())) == 3 + 12


def test_a_request_admitted_again_with_its_sampled_tokens_goes_on(driver: StepDriver) -> None:
    expected = greedy_tokens(PROMPTS["a"], 12)
    options = SamplingOptions(seed=0, temperature=0.0, logprobs=0)
    driver.admit(2, "a", PROMPTS["a"] + expected[:7], options, num_prompt=len(PROMPTS["a"]))
    driver.start({2: 6})
    driver.start({2: 11})
    driver.run(4)
    assert driver.tokens["a"] == expected[7:]


def test_leading_tokens_already_in_shared_blocks_are_not_computed_again(driver: StepDriver) -> None:
    first = driver.admit(0, "a", PROMPTS["a"])
    driver.run(2)
    prompt = [*PROMPTS["a"][:8], 44, 45]
    row = driver.admit(1, "shares", prompt, cached=first, num_computed=8)
    assert row.blocks[:2] == first.blocks[:2]
    driver.run(5)
    assert driver.tokens["shares"] == greedy_tokens(prompt, 5)


def test_a_step_can_hold_more_blocks_and_rows_than_any_before(driver: StepDriver) -> None:
    for slot in range(NUM_SLOTS):
        driver.admit(slot, str(slot), [slot] * 40)
    driver.run(12)
    assert driver.tokens == {str(s): greedy_tokens([s] * 40, 12) for s in range(NUM_SLOTS)}


class _SlowReader(HashLM):
    """Reads what the step's plan said again after the main thread has long gone on."""

    seen: list[tuple[list[int], list[int]]]

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache, attention: AttentionMetadata
    ) -> torch.Tensor:
        before = attention.query_start.numpy().tolist()
        time.sleep(0.02)
        self.seen.append((before, attention.query_start.numpy().tolist()))
        return super().forward(input_ids, positions, kv_cache, attention)


def test_a_steps_host_buffers_are_not_overwritten_while_it_reads_them() -> None:
    config = make_config()
    model = _SlowReader(config.model, torch.float32, torch.device("cpu"), ParallelGroup())
    model.seen = []
    driver = StepDriver(config, model)
    admit_all(driver)
    driver.start()
    for i in range(12):
        driver.start(dict.fromkeys(([5], [0, 2, 5], [2])[i % 3], 1))
        if len(driver.in_flight) > 2:
            driver.finish()
    driver.drain()
    assert len(model.seen) == 13
    assert all(before == after for before, after in model.seen)
    for name, prompt in PROMPTS.items():
        assert driver.tokens[name] == greedy_tokens(prompt, len(driver.tokens[name]))
    driver.close()


def test_a_step_too_many_in_flight_is_refused_and_corrupts_nothing() -> None:
    driver = StepDriver(make_config(step_ms=5))
    admit_all(driver)
    for _ in range(3):
        driver.start()
    plan = driver.plan()
    with pytest.raises(StepaheadError, match="step 3 was started before step 0 returned"):
        driver.runner.execute(plan)
    driver.drain()
    assert driver.tokens["a"] == greedy_tokens(PROMPTS["a"], 3)
    driver.close()


def test_each_steps_output_is_its_own_whenever_it_is_read(driver: StepDriver) -> None:
    admit_all(driver)
    outputs = [driver.start(), driver.start(), driver.start()]
    for output in outputs:
        output.get_output(30)
    tokens = [output.get_output().sampled[0, 0] for output in outputs]
    assert tokens == greedy_tokens(PROMPTS["a"], 3)


def test_an_output_that_is_kept_does_not_change_when_its_host_buffer_is_used_again(driver: StepDriver) -> None:
    driver.admit(0, "a", PROMPTS["a"], SamplingOptions(seed=0, temperature=0.0, logprobs=1))
    driver.run(9)
    expected = greedy_tokens(PROMPTS["a"], 9)
    assert [output.sampled[0, 0] for output in driver.outputs] == expected
    assert [output.logprobs.token_ids[0].tolist() for output in driver.outputs] == [[t, t] for t in expected]


def test_steps_run_out_of_order_are_refused(driver: StepDriver) -> None:
    admit_all(driver)
    plan = driver.plan()
    driver.runner.execute(plan)
    with pytest.raises(StepaheadError, match="before step 0 sampled"):
        driver.runner.execute(driver.plan())
    with pytest.raises(StepaheadError, match="step 9"):
        driver.runner.sample(9, None)


def test_what_fails_on_the_device_comes_out_of_the_steps_output(driver: StepDriver) -> None:
    def broken_kernel() -> None:
        raise ValueError("illegal access")

    driver.admit(0, "a", PROMPTS["a"])
    before = driver.start()
    driver.device.launch(broken_kernel)
    failed, later = driver.start(), driver.start()
    assert before.get_output(30).num_sampled.tolist() == [1]
    for output in (failed, later):
        with pytest.raises(ValueError, match="illegal access"):
            output.get_output(30)
        assert output.done()


def test_grammar_masks_bind_only_the_rows_they_name(driver: StepDriver) -> None:
    admit_all(driver)
    bits = np.zeros((2, 4), np.uint32)
    bits[0, 2] = 1 << 17  # token 81
    bits[1, 0] = 1 << 31 | 1 << 4  # tokens 31 and 4
    driver.start(grammar=GrammarMasks(np.array([2, 0], np.int32), bits))
    driver.finish()
    logits = context_logits(hash_model(), PROMPTS["a"])[-1]
    assert driver.tokens["c"] == [81]
    assert driver.tokens["a"] == [31 if logits[31] > logits[4] else 4]
    assert driver.tokens["b"] == greedy_tokens(PROMPTS["b"], 1)


def test_a_grammar_mask_for_a_row_that_does_not_sample_is_left_out(driver: StepDriver) -> None:
    driver.admit(0, "a", PROMPTS["a"])
    driver.admit(1, "b", PROMPTS["b"])
    bits = np.zeros((2, 4), np.uint32)
    bits[:, 0] = [1 << 6, 1 << 7]
    driver.start({0: 3, 1: 1}, GrammarMasks(np.array([0, 1], np.int32), bits))
    driver.finish()
    assert driver.tokens["b"] == [7]


def test_grammar_masks_of_the_wrong_width_are_refused(driver: StepDriver) -> None:
    driver.admit(0, "b", PROMPTS["b"])
    with pytest.raises(ValueError, match=r"shape \(1, 3\), not \(1, 4\)"):
        driver.start(grammar=GrammarMasks(np.array([0], np.int32), np.zeros((1, 3), np.uint32)))


def test_device_times_cover_the_forward_and_do_not_overlap() -> None:
    driver = StepDriver(make_config(step_ms=10))
    admit_all(driver)
    began = time.monotonic_ns()
    driver.run(4)
    spans = [(o.device_start_ns, o.device_end_ns) for o in driver.outputs]
    assert began <= spans[0][0]
    assert spans[-1][1] <= time.monotonic_ns()
    assert all(end - start >= 10_000_000 for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    driver.close()


def test_the_main_thread_is_free_while_the_device_runs() -> None:
    driver = StepDriver(make_config(step_ms=1000))
    admit_all(driver)
    driver.start()
    driver.start()
    assert not driver.in_flight[0][0].done(), "the first step has not ended, yet the second is launched"
    driver.drain()
    driver.close()


def test_nothing_of_a_step_reads_a_device_value_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPAHEAD_SYNC_CHECK", "error")
    driver = StepDriver()
    everything = SamplingOptions(
        seed=1, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1,
        min_tokens=3, stop_token_ids=[1, 2], logit_bias={3: 1.0}, allowed_token_ids=list(range(90)),
        bad_words=[[5, 6], [7]], logprobs=3, prompt_logprobs=2,
    )  # fmt: skip
    driver.admit(0, "a", PROMPTS["a"], everything)
    driver.admit(1, "b", PROMPTS["b"], GREEDY)
    driver.run(6)
    assert len(driver.tokens["a"]) == 6
    driver.close()
