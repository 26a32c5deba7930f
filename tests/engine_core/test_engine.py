"""The step loop against a device on paper: single claims."""

from __future__ import annotations

import numpy as np
import pytest

from conversation import Story, play
from paper_device import VOCAB, Done, PaperExecutor, generate_alone, next_token, paper_config
from stepahead.engine_core.engine import EngineCore
from stepahead.engine_core.messages import EngineRequest
from stepahead.errors import ConfigError
from stepahead.worker.messages import StepOutput


def make_engine(**settings: object) -> EngineCore:
    config = paper_config(**settings)
    return EngineCore(config, PaperExecutor(config))


class WatchedExecutor(PaperExecutor):
    """Notes when steps start and when they are waited for."""

    log: list[str]

    def execute_model(self, plan):
        self.__dict__.setdefault("log", []).append(f"start {plan.step_id}")
        return super().execute_model(plan)

    def sample_tokens(self, grammar):
        step_id, output, log = self.plans[-1].step_id, super().sample_tokens(grammar), self.log

        class Waited(Done):
            def result(self) -> StepOutput:
                log.append(f"wait {step_id}")
                return self.value

        return Waited(output.value)


def test_step_two_starts_before_step_one_is_waited_for() -> None:
    config = paper_config()
    engine = EngineCore(config, WatchedExecutor(config))
    play(engine, [Story(prompt=(1, 2, 3), max_tokens=4)])
    assert engine.executor.log == [
        "start 1", "start 2", "wait 1", "start 3", "wait 2", "start 4", "wait 3", "wait 4",
    ]  # fmt: skip


def test_synchronous_scheduling_waits_for_each_step() -> None:
    config = paper_config(async_scheduling=False)
    engine = EngineCore(config, WatchedExecutor(config))
    play(engine, [Story(prompt=(1, 2, 3), max_tokens=2)])
    assert engine.executor.log == ["start 1", "wait 1", "start 2", "wait 2"]


def test_no_step_is_scheduled_beyond_max_tokens() -> None:
    engine = make_engine()
    play(engine, [Story(prompt=(1, 2, 3), max_tokens=5)])
    assert len(engine.executor.plans) == 5
    assert engine.stats.rows_beyond_limit == engine.stats.wasted_rows == 0


def test_a_stop_wastes_one_row_and_no_client_sees_it() -> None:
    prompt = (4, 5)
    stop = generate_alone(prompt, 4, (), 512)[2]
    expected = generate_alone(prompt, 50, (stop,), 512)
    engine = make_engine()
    seen = play(engine, [Story(prompt=prompt, max_tokens=50, stop_ids=(stop,))])
    assert seen.tokens[0] == expected
    assert seen.finished[0].stop_token == stop
    assert engine.stats.wasted_rows == 1


def test_more_stop_ids_than_the_table_has_columns_for() -> None:
    prompt = (4, 5)
    tokens = generate_alone(prompt, 30, (), 512)
    others = list(range(1000, 1020))
    engine = make_engine()
    seen = play(engine, [Story(prompt=prompt, max_tokens=30, stop_ids=(*others, tokens[4]))])
    assert seen.tokens[0] == generate_alone(prompt, 30, (tokens[4],), 512)


def test_a_chunk_that_does_not_finish_its_prompt_samples_nothing() -> None:
    engine = make_engine(max_num_batched_tokens=4)
    play(engine, [Story(prompt=tuple(range(10)), max_tokens=1)])
    assert [plan.samples.tolist() for plan in engine.executor.plans] == [[False], [False], [True]]


def test_a_long_prompt_does_not_keep_running_requests_waiting() -> None:
    """Older or younger: decodes come first, the prompt gets what they leave of each step."""
    stories = [Story(prompt=(1,), max_tokens=20, priority=1), Story(prompt=tuple(range(30)), max_tokens=1, arrives=3)]
    engine = make_engine(max_num_batched_tokens=4, scheduling_policy="priority")
    play(engine, stories)
    decode_slot = engine.executor.plans[0].slots[0]
    assert all(decode_slot in plan.slots for plan in engine.executor.plans[:20])
    assert all(plan.num_query.sum() == 4 for plan in engine.executor.plans[4:13])


def test_a_prompt_wholly_in_the_cache_still_computes_a_token() -> None:
    engine = make_engine(block_size=4)
    prompt = tuple(range(8))
    seen = play(engine, [Story(prompt=prompt, max_tokens=2), Story(prompt=prompt, max_tokens=2, arrives=20)])
    assert seen.tokens[0] == seen.tokens[1]
    assert seen.finished[1].num_cached_tokens == 4


def test_a_conversation_finds_its_own_answer_in_the_cache() -> None:
    engine = make_engine(block_size=4)
    first = (1, 2, 3)
    answer = tuple(generate_alone(first, 14, (), 512))
    story = [Story(prompt=first, max_tokens=14), Story(prompt=(*first, *answer, 9), max_tokens=1, arrives=60)]
    seen = play(engine, story)
    assert seen.finished[1].num_cached_tokens == 16


def test_prompts_with_different_salts_share_nothing() -> None:
    engine = make_engine(block_size=4)
    prompt = tuple(range(12))
    stories = [Story(prompt=prompt, max_tokens=1, salt="a"), Story(prompt=prompt, max_tokens=1, salt="b", arrives=20)]
    assert play(engine, stories).finished[1].num_cached_tokens == 0


def test_preempted_request_keeps_tokens_in_flight() -> None:
    engine = make_engine(block_size=4, num_kv_blocks=8, max_model_len=32, max_num_seqs=2)
    stories = [Story(prompt=(1, 2, 3), max_tokens=28), Story(prompt=(4, 5, 6), max_tokens=28)]
    seen = play(engine, stories)
    assert engine.stats.preemptions >= 1
    sampled = sum(int(plan.samples.sum()) for plan in engine.executor.plans)
    assert sampled == len(seen.tokens[0]) + len(seen.tokens[1])


def test_the_oldest_request_is_never_preempted() -> None:
    engine = make_engine(block_size=1, num_kv_blocks=32, max_model_len=32, max_num_seqs=4)
    seen = play(engine, [Story(prompt=(i, 1), max_tokens=30) for i in range(4)])
    first_slot = engine.executor.plans[0].new_requests[0].slot
    entries = [new for plan in engine.executor.plans for new in plan.new_requests if new.slot == first_slot]
    assert entries[0].token_ids.tolist() == [0, 1]
    assert len([new for new in entries if new.token_ids[0] == 0]) == 1
    assert all(len(tokens) == 30 for tokens in seen.tokens.values())


def test_a_newcomer_waits_until_the_running_can_still_grow() -> None:
    engine = make_engine(block_size=4, num_kv_blocks=4, max_model_len=16, max_num_seqs=4)
    play(engine, [Story(prompt=tuple(range(12)), max_tokens=4), Story(prompt=(1, 2, 3), max_tokens=2)])
    assert engine.stats.preemptions == 0


def test_a_lower_priority_number_goes_first() -> None:
    engine = make_engine(max_num_seqs=1, scheduling_policy="priority")
    stories = [Story(prompt=(i,), max_tokens=2, priority=priority) for i, priority in enumerate((2, 1, 0))]
    play(engine, stories)
    order = [int(new.token_ids[0]) for plan in engine.executor.plans for new in plan.new_requests]
    assert order == [2, 1, 0]


def test_what_can_never_fit_is_refused_and_names_the_limit() -> None:
    engine = make_engine(num_kv_blocks=4, block_size=4)
    seen = play(engine, [Story(prompt=tuple(range(16)), max_tokens=1), Story(prompt=(1, 2), max_tokens=3)])
    assert seen.finished[0].reason == "error"
    assert "16 tokens" in seen.finished[0].message
    assert "max_model_len=16" in seen.finished[0].message
    assert seen.tokens[1] == generate_alone((1, 2), 3, (), 512)


def test_a_context_longer_than_the_pool_is_an_error_only_when_asked_for() -> None:
    assert make_engine(num_kv_blocks=4, block_size=4).info.max_model_len == 16
    with pytest.raises(ConfigError, match="max_model_len=100 does not fit"):
        make_engine(num_kv_blocks=4, block_size=4, max_model_len=100)


def test_an_abort_that_arrives_during_a_step_is_applied_before_its_outputs() -> None:
    engine = make_engine()
    engine.add_request(Story(prompt=(1, 2), max_tokens=9).message(0))
    engine.step()
    engine.early_aborts.append(0)
    assert engine.step() is None
    while engine.has_work():
        assert engine.step() is None
    assert engine.stats.aborted_rows == 2


def test_a_step_whose_rows_have_all_died_is_drained() -> None:
    engine = make_engine()
    engine.add_request(Story(prompt=(1, 2), max_tokens=9).message(0))
    engine.step()
    engine.step()
    engine.abort_requests([0])
    assert engine.has_work()
    while engine.has_work():
        engine.step()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_a_reused_slot_does_not_receive_its_previous_owners_token() -> None:
    prompt, other = (4, 5), (9, 9, 9)
    stop = generate_alone(prompt, 3, (), 512)[2]
    engine = make_engine(max_num_seqs=1)
    seen = play(engine, [Story(prompt=prompt, max_tokens=50, stop_ids=(stop,)), Story(prompt=other, max_tokens=6)])
    assert engine.stats.wasted_rows == 1
    assert seen.tokens[1] == generate_alone(other, 6, (), 512)


class EvenAfterOdd:
    """A toy grammar: the next token's parity is the opposite of the last one's."""

    def __init__(self, structured: set[int]) -> None:
        self.structured = structured
        self.last: dict[int, int] = {}

    def constrains(self, request: EngineRequest) -> bool:
        return request.request_id in self.structured

    def masks(self, request_ids: np.ndarray) -> np.ndarray:
        words = -(-VOCAB // 32)
        even, odd = np.uint32(0x55555555), np.uint32(0xAAAAAAAA)
        rows = [odd if self.last.get(int(i), 1) % 2 == 0 else even for i in request_ids]
        return np.repeat(np.array(rows, np.uint32)[:, None], words, axis=1)

    def advance(self, request_ids: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> None:
        self.last.update(zip(np.repeat(request_ids, counts).tolist(), tokens.tolist(), strict=True))

    def finished(self, request_id: int) -> None:
        self.last.pop(request_id, None)


def structured_alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for nth in range(max_tokens):
        token = next_token(tokens)
        tokens.append(token if token % 2 == nth % 2 else (token + 1) % VOCAB)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_structured_requests_are_sampled_once_their_mask_is_known(depth: int) -> None:
    config = paper_config(pipeline_parallel_size=max(depth - 1, 1), async_scheduling=depth > 1)
    assert config.max_in_flight == depth
    engine = EngineCore(config, PaperExecutor(config), EvenAfterOdd({0, 1}))
    seen = play(engine, [Story(prompt=(i + 3,), max_tokens=8, arrives=i) for i in range(3)])
    assert seen.tokens[0] == structured_alone((3,), 8)
    assert seen.tokens[1] == structured_alone((4,), 8)
    assert seen.tokens[2] == generate_alone((5,), 8, (), 512)
    assert (engine.stats.deferred_samplings > 0) == (depth > 1)


def test_unstructured_steps_are_never_deferred() -> None:
    config = paper_config()
    engine = EngineCore(config, PaperExecutor(config), EvenAfterOdd(set()))
    play(engine, [Story(prompt=(3,), max_tokens=8)])
    assert engine.stats.deferred_samplings == 0
