"""What torchrun passes on of its ranks' output, and what it says itself when one has failed."""

from __future__ import annotations

import re
import signal
import sys
from typing import NamedTuple

MARK = "\x1e${local_rank}\x1e"
"""What torchrun is to put before each piece of a rank's output: nothing that a rank would print."""

_MARKED = re.compile("\x1e(\\d+)\x1e")
_FAILED_FIRST = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)")
_FAILED = re.compile(r"\(local_rank: (?P<rank>\d+)\)\s+exitcode\s*: (?P<code>-?\d+)")
"""What torchrun says of the first failure that it has seen, and then of each in a table."""

_RAISED = "Traceback (most recent call last):"


class RankFailure(NamedTuple):
    """exit_code: below 0 the signal that killed it."""

    local_rank: int
    exit_code: int


def first_failure(said: str, raised: set[int], bereft: set[int]) -> RankFailure | None:
    """said: torchrun's own output. raised, bereft: see RankLines. Returns: the rank that failed by itself. torchrun
    only looks now and then, takes the lowest rank of those that have ended since, and stops the others, be they in the
    middle of their own end."""
    first = _FAILED_FIRST.search(said)
    if first is None:
        return None
    found = [RankFailure(int(f["rank"]), int(f["code"])) for f in (first, *_FAILED.finditer(said))]
    for other in found if found[0].local_rank in bereft else []:
        was_stopped = other.exit_code == -signal.SIGTERM
        if other.local_rank not in bereft and (other.local_rank in raised or not was_stopped):
            return other._replace(exit_code=found[0].exit_code) if was_stopped else other
    return found[0]


class RankLines:
    """Prints whole lines of the ranks on standard error, each with its rank. torchrun passes on what a rank has written
    so far, be it half a line, and then a piece of another rank's.

    raised: local ranks that have shown a traceback. bereft: those that have said that another one is gone, or
    that the engine is.
    """

    def __init__(self, first_rank: int) -> None:
        from stepahead.errors import PeerLostError
        from stepahead.worker.engine_link import LINK_LOST
        from stepahead.worker.heart import NO_SIGN_OF_ENGINE
        from stepahead.worker.process import ENGINE_HAS_FAILED

        self._says_bereft = (
            f"{PeerLostError.__name__}: ", ENGINE_HAS_FAILED, LINK_LOST, NO_SIGN_OF_ENGINE.partition("%")[0],
        )  # fmt: skip
        self._first_rank = first_rank
        self.raised: set[int] = set()
        self.bereft: set[int] = set()
        self._begun: dict[int, str] = {}

    def take(self, text: str) -> str:
        """Returns: what of it comes from no rank."""
        others, *pieces = _MARKED.split(text)
        for local_rank, piece in zip(map(int, pieces[::2]), pieces[1::2], strict=True):
            begun = self._begun.pop(local_rank, "") + piece
            if begun.endswith("\n"):
                self._print(local_rank, begun)
            else:
                self._begun[local_rank] = begun
        # What torchrun says goes on where a rank has left a line unfinished.
        return others + "".join(piece for piece in pieces[1::2] if _FAILED_FIRST.search(piece))

    def end(self) -> None:
        for local_rank, begun in self._begun.items():
            self._print(local_rank, begun + "\n")

    def _print(self, local_rank: int, line: str) -> None:
        if _RAISED in line:
            self.raised.add(local_rank)
        elif any(words in line for words in self._says_bereft):
            self.bereft.add(local_rank)
        print(f"[rank {self._first_rank + local_rank}] {line}", end="", file=sys.stderr, flush=True)
