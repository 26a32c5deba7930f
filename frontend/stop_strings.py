"""Stop strings in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """text[start:end] is `string`."""

    start: int
    end: int
    string: str


class StopStrings:
    """The stop strings of one request. Holds no state of the text."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = list(strings)
        self._longest = max(map(len, self._strings))

    def find(self, text: str, searched: int) -> StopMatch | None:
        """The match that ends first among those ending after text[:searched]; of two, the longer one.

        The first end, not the first start: so the result is the same however the text was cut into tokens.
        """
        best: StopMatch | None = None
        for string in self._strings:
            start = text.find(string, max(0, searched - len(string) + 1))
            if start < 0:
                continue
            end = start + len(string)
            if best is None or end < best.end or (end == best.end and start < best.start):
                best = StopMatch(start, end, string)
        return best

    def open_tail(self, text: str) -> int:
        """Length of the longest end of `text` that may still become a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(string.startswith(tail) for string in self._strings):
                return length
        return 0
