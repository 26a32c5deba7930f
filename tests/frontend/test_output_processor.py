"""Tokens to outputs: stops, hold-back, logprobs, and the cost of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_engine import batch, fake_engine
from small_tokenizers import byte_level
from stepahead.engine_core.messages import FinishedRequest, RequestPromptLogprobs
from stepahead.frontend.sampling_params import RequestOutputKind, SamplingParams
from stepahead.worker.messages import Logprobs

TOKENIZER = byte_level()


@pytest.fixture
def engine():
    made = fake_engine(print, TOKENIZER, lambda request: [])
    yield made
    made.client.close()


def submit(engine, prompt="a", name="0", **params):
    prepared = engine.requests.prepare(prompt, SamplingParams(**{"max_tokens": 90, **params}))
    return engine.outputs.add(name, prepared), [request.request_id for request in prepared.engine_requests]


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def feed(engine, engine_id, text, step=1):
    """Feeds a text's tokens, `step` at a time. Returns the ids that were to be aborted."""
    aborts = []
    ids = encode(text)
    for start in range(0, len(ids), step):
        _, more = engine.outputs.process(batch([(engine_id, ids[start : start + step])]))
        aborts += more
    return aborts


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(("include", "expected"), [(False, "The sea "), (True, "The sea is w")])
def test_text_is_cut_exactly_at_the_stop_string_and_the_request_aborted(engine, step, include, expected):
    state, (engine_id,) = submit(engine, stop=["is w"], include_stop_str_in_output=include)
    aborts = feed(engine, engine_id, "The sea is wide and the ship sails", step)
    (output,) = state.take_output().outputs
    assert output.text == expected
    assert (output.finish_reason, output.stop_reason) == ("stop", "is w")
    assert aborts == [engine_id]
    assert state.finished


def test_tokens_after_the_stop_string_are_not_reported(engine):
    state, (engine_id,) = submit(engine, stop=["wide"])
    feed(engine, engine_id, "The sea is wide and the ship sails", step=100)
    (output,) = state.take_output().outputs
    assert TOKENIZER.decode(output.token_ids).endswith("wide")


def test_what_arrives_after_the_stop_is_ignored(engine):
    state, (engine_id,) = submit(engine, stop=["wide"])
    feed(engine, engine_id, "The sea is wide")
    before = state.take_output()
    entry = FinishedRequest(engine_id, "length")
    assert engine.outputs.process(batch([(engine_id, [10, 11])], [entry])) == ([], [])
    assert state.take_output() == before


def test_a_stop_string_within_min_tokens_does_not_end_it(engine):
    text = "sea sea sea sea"
    num_first = len(encode("sea sea"))
    state, (engine_id,) = submit(engine, stop=["sea"], min_tokens=num_first)
    feed(engine, engine_id, text)
    assert state.take_output().outputs[0].text == "sea sea "


def test_the_token_that_stops_is_reported_but_not_in_the_text(engine):
    state, (engine_id,) = submit(engine, stop_token_ids=[50], skip_special_tokens=False)
    tokens = [*encode("wide"), 50]
    entry = FinishedRequest(engine_id, "stop", stop_token=50, num_cached_tokens=16)
    _, aborts = engine.outputs.process(batch([(engine_id, tokens)], [entry]))
    result = state.take_output()
    (output,) = result.outputs
    assert (output.text, output.token_ids) == ("wide", tokens)
    assert (output.finish_reason, output.stop_reason) == ("stop", 50)
    assert result.num_cached_tokens == 16
    assert result.finished
    assert aborts == []


def test_the_models_own_end_has_no_stop_reason(engine):
    state, (engine_id,) = submit(engine)
    engine.outputs.process(batch([(engine_id, [*encode("wide"), 2])], [FinishedRequest(engine_id, "stop", 2)]))
    (output,) = state.take_output().outputs
    assert (output.finish_reason, output.stop_reason, output.text) == ("stop", None, "wide")


def test_half_a_character_at_the_end_is_flushed(engine):
    state, (engine_id,) = submit(engine)
    ids = encode("sea😀")[:-1]
    engine.outputs.process(batch([(engine_id, ids)], [FinishedRequest(engine_id, "length")]))
    assert state.take_output().outputs[0].text == TOKENIZER.decode(ids)


def test_a_request_may_end_without_a_token(engine):
    state, (engine_id,) = submit(engine)
    updated, _ = engine.outputs.process(batch([], [FinishedRequest(engine_id, "error", message="does not fit")]))
    assert updated == [state]
    assert "does not fit" in str(state.error)
    assert state.take_output().outputs[0].finish_reason == "error"


def test_a_forgotten_request_is_ignored_and_named_for_abortion(engine):
    state, ids = submit(engine, n=2)
    engine.outputs.process(batch([(ids[0], [9])], [FinishedRequest(ids[0], "length")]))
    assert engine.outputs.forget([state]) == [ids[1]]
    assert engine.outputs.process(batch([(ids[1], [9])])) == ([], [])


def test_sequences_of_one_request_keep_apart(engine):
    state, (first, second) = submit(engine, n=2, seed=1)
    engine.outputs.process(batch([(second, encode("wide")), (first, encode("sea"))]))
    engine.outputs.process(batch([(first, [9])], [FinishedRequest(first, "length")]))
    assert not state.finished
    engine.outputs.process(batch([], [FinishedRequest(second, "length")]))
    assert state.finished
    assert [output.index for output in state.take_output().outputs] == [0, 1]
    assert state.take_output().outputs[1].text == "wide"


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_deltas_add_up_to_the_whole_and_show_no_part_of_a_stop_string(data):
    engine = fake_engine(print, TOKENIZER, lambda request: [])
    text = data.draw(st.text(st.sampled_from("ab é😀"), min_size=1, max_size=20))
    stops = data.draw(st.lists(st.text("ab é", min_size=1, max_size=4), max_size=2))
    kinds = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)
    states = [submit(engine, name=str(kind), stop=stops, output_kind=kind) for kind in kinds]
    ids = encode(text)
    joined, joined_ids = "", []
    for place, token in enumerate(ids):
        last = place == len(ids) - 1
        finished = [FinishedRequest(engine_id, "length") for _, (engine_id,) in states if last]
        engine.outputs.process(batch([(engine_id, [token]) for _, (engine_id,) in states], finished))
        delta, whole = (state.take_output().outputs[0] for state, _ in states)
        joined += delta.text
        joined_ids += delta.token_ids
        assert whole.text == joined
        assert whole.token_ids == joined_ids
        assert text.startswith(joined)
        if states[0][0].finished:
            break
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert joined == text
    assert all(stop not in joined for stop in stops)
    engine.client.close()


def logprob_rows(rows):
    """rows: (token ids, logprobs, rank)."""
    return Logprobs(
        token_ids=np.array([row[0] for row in rows], np.int32),
        logprobs=np.array([row[1] for row in rows], np.float32),
        ranks=np.array([row[2] for row in rows], np.int32),
    )


def test_each_request_reads_its_own_logprobs(engine):
    one, (first,) = submit(engine, logprobs=1)
    two, (second,) = submit(engine, name="1", logprobs=0)
    none, (third,) = submit(engine, name="2")
    rows = logprob_rows(
        [([7, 8, 9], [-1.5, -0.5, -1.0], 3), ([6, 5, 4], [-4.0, -1.0, -2.0], 9), ([3, 3, 4], [-0.25, -0.25, -2.0], 1)]
    )
    engine.outputs.process(batch([(third, [7]), (first, [6]), (second, [3])], logprobs=rows))
    (output,) = one.take_output().outputs
    assert list(output.logprobs[0]) == [6, 5]
    assert (output.logprobs[0][6].rank, output.logprobs[0][5].rank) == (9, 1)
    assert output.logprobs[0][6].logprob == output.cumulative_logprob == -4.0
    assert output.logprobs[0][5].decoded_token == TOKENIZER.decode([5])
    assert list(two.take_output().outputs[0].logprobs[0]) == [3]
    assert none.take_output().outputs[0].logprobs is None
    assert none.take_output().outputs[0].cumulative_logprob is None


def test_a_chosen_token_among_the_likely_ones_is_listed_once(engine):
    state, (engine_id,) = submit(engine, logprobs=2)
    engine.outputs.process(batch([(engine_id, [8])], logprobs=logprob_rows([([8, 7, 8], [-1.0, -0.5, -1.0], 2)])))
    entries = state.take_output().outputs[0].logprobs[0]
    assert {token: entry.rank for token, entry in entries.items()} == {8: 2, 7: 1}


def test_logprobs_end_with_the_tokens_at_a_stop_string(engine):
    state, (engine_id,) = submit(engine, stop=["sea"], logprobs=0)
    ids = encode("sea is wide")
    rows = logprob_rows([([token], [-1.0], 1) for token in ids])
    engine.outputs.process(batch([(engine_id, ids)], logprobs=rows))
    (output,) = state.take_output().outputs
    assert [list(entries) for entries in output.logprobs] == [[token] for token in output.token_ids]


def test_prompt_logprobs_have_none_for_the_first_token(engine):
    state, (engine_id,) = submit(engine, prompt=[5, 6, 7], prompt_logprobs=0)
    values = logprob_rows([([6], [-1.0], 4), ([7], [-2.0], 5)])
    entry = RequestPromptLogprobs(engine_id, values)
    engine.outputs.process(batch([(engine_id, [9])], prompt_logprobs=[entry]))
    first, *rest = state.take_output().prompt_logprobs
    assert first is None
    assert [(list(entries), entries[token].logprob) for token, entries in zip([6, 7], rest, strict=True)] == [
        ([6], -1.0),
        ([7], -2.0),
    ]


def test_metrics_tell_when_tokens_came(engine):
    state, (engine_id,) = submit(engine)
    assert state.metrics.first_token_time is None
    engine.outputs.process(batch([(engine_id, [9])]))
    first = state.metrics.first_token_time
    engine.outputs.process(batch([(engine_id, [9])]))
    assert state.metrics.arrival_time <= first < state.metrics.last_token_time


def test_without_a_tokenizer_there_are_tokens_and_no_text():
    engine = fake_engine(print, None, lambda request: [])
    state, (engine_id,) = submit(engine, prompt=[5], logprobs=0)
    engine.outputs.process(batch([(engine_id, [9])], logprobs=logprob_rows([([9], [-1.0], 1)])))
    (output,) = state.take_output().outputs
    assert (output.text, output.token_ids, output.logprobs[0][9].decoded_token) == ("", [9], None)
    engine.client.close()
