"""Text comes out as the tokenizer would decode it, one token at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from small_tokenizers import TEXT, byte_level, llama_like, metaspace, word_pieces
from stepahead.frontend.detokenizer import DetokenizerFactory, PieceDetokenizer, WindowDetokenizer

MAKERS = {
    "byte_level": byte_level,
    "llama_like": llama_like,
    "gemma_like": lambda: llama_like(strip=False),
    "metaspace": metaspace,
    "word_pieces": word_pieces,
}
NAMES = list(MAKERS)
REPLACEMENT = "\ufffd"


def decode(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def stream(tokenizer, prompt, ids, skip=True):
    """The chunks as they come, the flushed one last."""
    detokenizer = DetokenizerFactory(tokenizer).make(prompt, skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXT)
def test_text_after_a_prompt_is_what_the_tokens_add_to_it(name, text):
    tokenizer = MAKERS[name]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(1, len(ids)):
        prompt, output = ids[:cut], ids[cut:]
        if name in ("llama_like", "gemma_like") and tokenizer.convert_ids_to_tokens(output[0]).startswith("<0x"):
            continue  # the prompt may end in the middle of a character
        if REPLACEMENT in decode(tokenizer, prompt):
            continue
        assert decode(tokenizer, prompt) + "".join(stream(tokenizer, prompt, output)) == decode(tokenizer, ids)


@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_byte_level_text_equals_decode_for_any_tokens(skip, data):
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 5), max_size=40))
    assert "".join(stream(tokenizer, [5], ids, skip)) == decode(tokenizer, ids, skip)


@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_byte_fallback_text_equals_decode_for_any_tokens_whose_bytes_spell_characters(skip, data):
    tokenizer = llama_like()
    first_piece = 3 + 256
    pieces = st.integers(first_piece, len(tokenizer) - 1).map(lambda token_id: [token_id])
    special = st.integers(0, 2).map(lambda token_id: [token_id])
    characters = st.characters(codec="utf-8").map(lambda char: [3 + byte for byte in char.encode()])
    parts = data.draw(st.lists(st.one_of(pieces, special, characters), max_size=30))
    ids = [token_id for part in parts for token_id in part]
    start = tokenizer.convert_tokens_to_ids("s")
    assert "s" + "".join(stream(tokenizer, [start], ids, skip)) == decode(tokenizer, [start, *ids], skip)


@given(st.binary(max_size=30))
@settings(deadline=None, max_examples=200)
def test_byte_fallback_keeps_every_character_that_broken_bytes_hold(data):
    """tokenizers' own decoder turns a whole run of byte tokens into U+FFFD when one is wrong; we need not."""
    expected = data.decode("utf-8", "replace").replace(REPLACEMENT, "")
    text = "".join(stream(llama_like(), [1], [3 + byte for byte in data]))
    assert text.replace(REPLACEMENT, "") == expected


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_no_chunk_holds_half_a_character(name, data):
    tokenizer = MAKERS[name]()
    text = data.draw(st.text(st.sampled_from("ab é😀👩‍👧世"), min_size=1, max_size=12))
    ids = tokenizer.encode(text, add_special_tokens=False)
    if REPLACEMENT in decode(tokenizer, ids):
        return
    assert not any(REPLACEMENT in chunk for chunk in stream(tokenizer, [5], ids))


def test_an_unfinished_character_is_held_and_shown_as_one_mark_at_the_end():
    tokenizer = byte_level()
    smile = tokenizer.convert_tokens_to_ids(list("ðŁĺ"))  # three of the four bytes of an emoji
    chunks = stream(tokenizer, [5], smile)
    assert chunks == ["", "", "", REPLACEMENT]
    assert "".join(chunks) == decode(tokenizer, smile)


def test_a_space_between_prompt_and_output_is_kept_and_not_doubled():
    tokenizer = llama_like()
    prompt = tokenizer.encode("The sea", add_special_tokens=False)
    output = tokenizer.encode("is wide", add_special_tokens=False)
    assert "".join(stream(tokenizer, prompt, output)) == " is wide"


def test_special_tokens_show_only_when_asked_for():
    tokenizer = byte_level()
    ids = [*tokenizer.encode("wide"), 2]
    assert "".join(stream(tokenizer, [5], ids, skip=True)) == "wide"
    assert "".join(stream(tokenizer, [5], ids, skip=False)) == "wide</s>"


def test_common_tokenizers_take_the_quick_road_and_others_the_window():
    for name, make in MAKERS.items():
        kind = WindowDetokenizer if name == "word_pieces" else PieceDetokenizer
        assert isinstance(DetokenizerFactory(make()).make([5], True), kind), name


@given(st.lists(st.integers(3, 100), min_size=1, max_size=30))
@settings(deadline=None, max_examples=60)
def test_the_window_agrees_with_the_quick_road(ids):
    tokenizer = metaspace()
    window = WindowDetokenizer(tokenizer, [10], True)
    slow = "".join([*(window.push(token_id) for token_id in ids), window.flush()])
    assert slow == "".join(stream(tokenizer, [10], ids))


def test_the_window_does_not_hold_tokens_for_ever():
    tokenizer = byte_level()
    stray = tokenizer.convert_tokens_to_ids("Ģ")  # 0x80, which begins no character
    window = WindowDetokenizer(tokenizer, [5], True)
    shown = "".join(window.push(stray) for _ in range(100))
    assert len(shown) > 50
