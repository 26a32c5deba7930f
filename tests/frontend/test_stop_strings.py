"""Stop strings are found wherever the text was cut into tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stepahead.frontend.stop_strings import StopStrings

WORDS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def first_end(text, strings):
    """By definition: the smallest end of any match, and of those the longest string."""
    for end in range(1, len(text) + 1):
        matches = [string for string in strings if text[:end].endswith(string)]
        if matches:
            return end, max(matches, key=len)
    return None


@given(WORDS, st.lists(st.text("abc", max_size=5), max_size=8))
@settings(max_examples=300)
def test_the_first_match_is_found_across_chunks(strings, chunks):
    stops, text = StopStrings(strings), ""
    expected = first_end("".join(chunks), strings)
    for chunk in chunks:
        searched = len(text)
        text += chunk
        match = stops.find(text, searched)
        if match is not None:
            assert (match.end, match.string) == expected
            assert text[match.start : match.end] == match.string
            return
    assert expected is None


@given(WORDS, st.text("abc", max_size=8), st.text("abc", max_size=8))
@settings(max_examples=300)
def test_shown_text_is_never_part_of_a_later_match(strings, before, after):
    stops = StopStrings(strings)
    if stops.find(before, 0) is not None:
        return
    shown = len(before) - stops.open_tail(before)
    match = stops.find(before + after, len(before))
    assert match is None or match.start >= shown


def test_nothing_is_held_when_no_stop_string_can_begin():
    assert StopStrings(["###", "END"]).open_tail("some text") == 0
    assert StopStrings(["###", "END"]).open_tail("some ##") == 2
