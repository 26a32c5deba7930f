"""The pool of KV blocks: who holds each, which content each is known to have, which goes next."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def root_digest(cache_salt: str) -> bytes:
    """The parent of a first block. Different salts never share a block."""
    return hashlib.sha256(cache_salt.encode()).digest()


def block_digest(parent: bytes, tokens: np.ndarray) -> bytes:
    """The key of a full block: its tokens (int32 [block_size]) and, through `parent`, all before it."""
    return hashlib.sha256(parent + tokens.tobytes()).digest()


class BlockPool:
    """Owns blocks 0 .. num_blocks - 1. A block nobody holds is free; if its content has a key it
    stays findable until it is the least recently used of the free ones and somebody needs it.

    A freed block may be handed out while a step in flight still reads it: the device runs steps in
    plan order, so whatever the new owner writes comes later.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = np.zeros(num_blocks, np.int32)
        self._digest: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    def allocate(self, count: int) -> np.ndarray:
        """int32 [count] blocks, held once. The caller has checked num_free."""
        assert count <= self.num_free, f"allocating {count} of {self.num_free} free blocks"
        while len(self._blank) < count:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self._blank.append(block)
        start = len(self._blank) - count
        blocks = np.array(self._blank[start:], np.int32)
        del self._blank[start:]
        self._holders[blocks] = 1
        return blocks

    def release(self, blocks: np.ndarray) -> None:
        """Gives up one hold on each of `blocks`, in table order: later blocks are evicted first,
        so that what remains of a prefix is its beginning."""
        self._holders[blocks] -= 1
        left = self._holders[blocks]
        assert left.min(initial=0) >= 0, "a block was released twice"
        for block in blocks[left == 0][::-1].tolist():
            if self._digest[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a chain of digests. Holds nothing yet."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` count as free until somebody holds them."""
        return int((self._holders[np.array(blocks, np.int32)] == 0).sum())

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a holder to cached blocks just found."""
        self._holders[np.array(blocks, np.int32)] += 1
        for block in blocks:
            self._cached.pop(block, None)

    def remember(self, block: int, digest: bytes) -> None:
        """Makes a full block findable. If another block already has this content, that one stays."""
        if self._digest[block] is None and digest not in self._block_of:
            self._digest[block] = digest
            self._block_of[digest] = block

    def forget_all(self) -> None:
        """Drops every key (the contents are no longer there, or no longer wanted)."""
        self._block_of.clear()
        self._digest = [None] * self.num_blocks
        self._blank.extend(self._cached)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        digest = self._digest[block]
        assert digest is not None
        del self._block_of[digest]
        self._digest[block] = None
