"""What runs at start-up leaves nothing behind that a request could see."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from step_driver import BLOCK_SIZE, CPU, GREEDY, MAX_LEN, NUM_SLOTS, StepDriver, greedy_tokens, hash_model, make_config
from stepahead.worker import memory
from stepahead.worker.device import share_interpreter
from stepahead.worker.warm_up import run_blank_step, run_whole_steps


def test_requests_after_the_warm_up_get_the_tokens_they_get_without_it() -> None:
    driver = StepDriver()
    run_whole_steps(driver.runner, BLOCK_SIZE, MAX_LEN)
    driver.admit(0, "a", [3, 1, 4])
    driver.admit(1, "b", [9] * 9)
    driver.run(6)
    assert driver.tokens == {"a": greedy_tokens([3, 1, 4], 6), "b": greedy_tokens([9] * 9, 6)}
    driver.close()


@pytest.mark.parametrize("max_model_len", [1, 3])
def test_a_context_too_short_for_the_warm_up_is_left_alone(max_model_len: int) -> None:
    driver = StepDriver()
    run_whole_steps(driver.runner, BLOCK_SIZE, max_model_len)
    driver.admit(0, "a", [3, 1, 4], GREEDY)
    driver.run(2)
    assert driver.tokens["a"] == greedy_tokens([3, 1, 4], 2)
    driver.close()


@pytest.mark.parametrize(("num_tokens", "query_len"), [(1, 1), (10, 3), (5, 2), (64, 8)])
def test_a_blank_step_has_a_row_for_each_part_of_its_tokens(num_tokens: int, query_len: int) -> None:
    logits = run_blank_step(hash_model(), CPU, BLOCK_SIZE, num_tokens, query_len)
    assert logits.shape == (-(-num_tokens // query_len), hash_model()._vocab.shape[0])


def test_the_memory_profile_runs_the_largest_step_with_its_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    model, computed, sampled = hash_model(), [], []
    forward, sample = model.forward, memory.gumbel_sample
    monkeypatch.setattr(model, "forward", lambda ids, *rest: computed.append(len(ids)) or forward(ids, *rest))
    monkeypatch.setattr(memory, "gumbel_sample", lambda logits, *rest: sampled.append(logits) or sample(logits, *rest))
    memory._profile_step(make_config(max_num_batched_tokens=48), CPU, model)
    assert computed == [48]
    assert [(len(logits), logits.dtype) for logits in sampled] == [(NUM_SLOTS, torch.float32)]


def test_a_wider_block_table_compiles_no_kernel_again() -> None:
    """Its width follows the longest context of the step: 1 or a multiple of 16 must not be a case of its own.

    A process of its own: where the kernels run interpreted, they have forgotten how they would be compiled.
    """
    code = (
        "from stepahead.kernels.paged_attention_decode import _decode_kernel as decode\n"
        "from stepahead.kernels.paged_attention_prefill import _prefill_kernel as prefill\n"
        "print(all('table_stride' in kernel.do_not_specialize for kernel in (decode, prefill)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"


def test_sharing_the_interpreter_never_makes_threads_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    intervals = [1e-5]
    monkeypatch.setattr("sys.getswitchinterval", lambda: intervals[-1])
    monkeypatch.setattr("sys.setswitchinterval", intervals.append)
    share_interpreter()
    assert intervals == [1e-5, 1e-5]
