"""A worker says what it is, sizes its KV pool, and runs steps."""

from __future__ import annotations

import os
import threading

import numpy as np
import psutil
import pytest

from step_driver import BLOCK_SIZE, CPU, GREEDY, MAX_LEN, NUM_SLOTS, greedy_tokens, hash_model, int32, make_config
from stepahead.errors import ConfigError, StepaheadError
from stepahead.worker.memory import kv_capacity
from stepahead.worker.messages import NewRequest, StepPlan
from stepahead.worker.worker import Worker

USEFUL = NUM_SLOTS * MAX_LEN // BLOCK_SIZE
PER_BLOCK = hash_model().kv_bytes_per_block(BLOCK_SIZE)
PROMPT = [3, 1, 4]


def one_row_plan(step: int) -> StepPlan:
    new = [NewRequest(2, int32(PROMPT), 3, 0, int32([5, 6, 1]), GREEDY)] if step == 0 else []
    empty, length = int32([]), len(PROMPT) + step
    query = int32([len(PROMPT) if step == 0 else 1])
    return StepPlan(step, new, empty, empty, empty, int32([2]), query, np.array([True]), empty, length)


def test_a_worker_runs_steps_ahead_of_their_outputs() -> None:
    worker = Worker(make_config(num_kv_blocks=8))
    info = worker.info()
    assert (info.rank, info.device, info.kv_blocks, info.pid) == (0, "cpu", 8, os.getpid())
    worker.initialize_cache(8, MAX_LEN)
    outputs = []
    for step in range(3):
        worker.execute_model(one_row_plan(step))
        outputs.append(worker.sample_tokens(step, None))
    results = [output.get_output(30) for output in outputs]
    assert [r.sampled[0, 0] for r in results] == greedy_tokens(PROMPT, 3)
    assert [r.step_id for r in results] == [0, 1, 2]
    worker.shutdown()
    worker.shutdown()


def test_a_step_before_initialize_cache_is_refused() -> None:
    worker = Worker(make_config())
    with pytest.raises(StepaheadError, match="initialize_cache"):
        worker.execute_model(one_row_plan(0))
    worker.shutdown()


def test_a_worker_that_cannot_start_leaves_no_device_thread() -> None:
    with pytest.raises(ConfigError):
        Worker(make_config(kv_cache_memory_bytes=PER_BLOCK - 1))
    assert "stepahead-cpu-device" not in [t.name for t in threading.enumerate()]


def test_num_kv_blocks_decides_over_everything() -> None:
    config = make_config(num_kv_blocks=USEFUL + 7, kv_cache_memory_bytes=PER_BLOCK)
    assert kv_capacity(config, CPU, hash_model()) == USEFUL + 7


def test_kv_cache_memory_bytes_is_divided_into_whole_blocks() -> None:
    config = make_config(kv_cache_memory_bytes=3 * PER_BLOCK + PER_BLOCK - 1)
    assert kv_capacity(config, CPU, hash_model()) == 3


def test_there_are_no_more_blocks_than_all_requests_can_hold() -> None:
    assert kv_capacity(make_config(), CPU, hash_model()) == USEFUL


@pytest.mark.parametrize(("available", "expected"), [(4 * 5 * PER_BLOCK, 5), (1 << 50, (4 << 30) // PER_BLOCK)])
def test_cpu_takes_a_quarter_of_the_free_memory_and_4_gib_at_most(
    monkeypatch: pytest.MonkeyPatch, available: int, expected: int
) -> None:
    memory = psutil.virtual_memory()._replace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    config = make_config(max_num_seqs=1 << 26)
    assert kv_capacity(config, CPU, hash_model()) == expected


def test_too_little_memory_for_one_block_names_the_setting_and_the_sizes() -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_memory_bytes leaves 1 bytes.*block_size=4.*takes {PER_BLOCK}"):
        kv_capacity(make_config(kv_cache_memory_bytes=1), CPU, hash_model())
