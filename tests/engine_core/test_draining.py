"""Preempted requests whose tokens are still in flight: whatever happens to them then, nobody else is harmed."""

from __future__ import annotations

from conversation import Story, play
from paper_device import PaperExecutor, generate_alone, paper_config
from stepahead.engine_core.engine import EngineCore
from stepahead.engine_core.request import State

MAX_LEN = 32


def make_engine() -> EngineCore:
    """A pool for one request of MAX_LEN, and a queue so deep that a preempted request drains for several turns."""
    config = paper_config(
        pipeline_parallel_size=3, block_size=4, num_kv_blocks=MAX_LEN // 4, max_model_len=MAX_LEN, max_num_seqs=3
    )
    return EngineCore(config, PaperExecutor(config))


def run_until_one_drains(engine: EngineCore) -> int:
    """Returns its id."""
    while engine.has_work():
        engine.step()
        for request in engine.scheduler.table.requests:
            if request is not None and request.state is State.DRAINING:
                return request.request_id
    raise AssertionError("no request was preempted with tokens in flight")


def test_an_abort_while_draining_lets_others_in() -> None:
    engine = make_engine()
    for request_id, prompt in enumerate([(1, 2, 3), (4, 5, 6), (7, 8, 9)]):
        engine.add_request(Story(prompt=prompt, max_tokens=28).message(request_id))
    draining = run_until_one_drains(engine)
    engine.abort_requests([draining])
    seen = play(engine, [])
    assert set(seen.finished) == {0, 1, 2} - {draining}


def test_nobody_overtakes_a_preempted_request() -> None:
    engine = make_engine()
    for request_id, prompt in enumerate([(1, 2, 3), (4, 5, 6)]):
        engine.add_request(Story(prompt=prompt, max_tokens=28).message(request_id))
    run_until_one_drains(engine)
    engine.add_request(Story(prompt=(7,), max_tokens=1).message(2))
    play(engine, [])
    entries = [int(new.token_ids[0]) for plan in engine.executor.plans for new in plan.new_requests]
    assert entries == [1, 4, 4, 7]


def test_a_block_that_was_given_up_is_not_remembered_when_its_last_token_lands() -> None:
    """It is the other request's by then: whoever continues the answer would read a stranger's tokens."""
    ended_while_draining = 0
    for others_tokens in range(12, 20):
        for max_tokens in range(10, 18):
            engine, prompt = make_engine(), (1, 2, 3)
            engine.add_request(Story(prompt=(40, 41, 42), max_tokens=others_tokens).message(0))
            engine.add_request(Story(prompt=prompt, max_tokens=max_tokens).message(1))
            exits = len(play(engine, []).finished) + engine.stats.preemptions
            entries = sum(len(plan.new_requests) for plan in engine.executor.plans)
            ended_while_draining += exits > entries
            follow_up = (*prompt, *generate_alone(prompt, max_tokens, (), MAX_LEN), 9)
            engine.add_request(Story(prompt=follow_up, max_tokens=2).message(2))
            assert play(engine, []).tokens[2] == generate_alone(follow_up, 2, (), MAX_LEN)
    assert ended_while_draining > 0
