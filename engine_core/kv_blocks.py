"""Which request holds which KV blocks: growth, the prefix cache, and giving back."""

from __future__ import annotations

import numpy as np

from .block_pool import BlockPool
from .request import Request
from .request_table import RequestTable

_NONE = np.empty(0, np.int32)
NO_APPENDS = (_NONE, _NONE, _NONE)


class KVBlocks:
    """Moves blocks between the pool and the table's block columns; nobody else writes those."""

    def __init__(self, table: RequestTable, pool: BlockPool, block_size: int, prefix_caching: bool) -> None:
        self.pool = pool
        self._table = table
        self._size = block_size
        self._prefix_caching = prefix_caching

    def missing(self, slots: np.ndarray, num_computed: np.ndarray) -> np.ndarray:
        """How many more blocks the rows need to hold `num_computed` tokens. int32 [n]."""
        needed = (num_computed + (self._size - 1)) // self._size
        return np.maximum(needed - self._table.num_blocks[slots], 0)

    def grow(self, slots: np.ndarray, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gives the rows the blocks they miss: (append_slots, append_blocks, append_index), int32 [m]."""
        table = self._table
        growing = np.flatnonzero(missing)
        counts = missing[growing]
        rows = np.repeat(slots[growing], counts)
        blocks = self.pool.allocate(len(rows))
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        index = table.num_blocks[rows] + nth
        table.block_table[rows, index] = blocks
        table.num_blocks[slots[growing]] += counts
        return rows.astype(np.int32), blocks, index.astype(np.int32)

    def find_cached(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of the request already. The last token is always computed, since
        its logits are wanted; so is every prompt token whose log-probability is."""
        if not self._prefix_caching or request.owes_prompt_logprobs:
            return []
        usable = (len(request.tokens) - 1) // self._size
        request.extend_digests(request.tokens, usable, self._size)
        return self.pool.find(request.digests[:usable])

    def spare_after(self, request: Request, cached: list[int]) -> int:
        """Free blocks that would be left if the request got blocks for all its known tokens."""
        missing = -(-len(request.tokens) // self._size) - len(cached)
        return self.pool.num_free - self.pool.num_unheld(cached) - missing

    def enter(self, slot: int, cached: list[int]) -> np.ndarray:
        """Gives a newly admitted request blocks for all its known tokens, the cached ones first.

        Returns: int32 [num_blocks].
        """
        table = self._table
        self.pool.hold(cached)
        missing = -(-int(table.num_tokens[slot]) // self._size) - len(cached)
        blocks = np.concatenate([np.array(cached, np.int32), self.pool.allocate(missing)])
        table.block_table[slot, : len(blocks)] = blocks
        table.num_blocks[slot] = len(blocks)
        table.num_remembered[slot] = len(cached)
        table.num_computed[slot] = len(cached) * self._size
        return blocks

    def remember_full(self, slots: np.ndarray) -> None:
        """Makes blocks findable whose tokens are all known and whose KV a started step computes: later
        steps may read them, since the device runs steps in order."""
        if not self._prefix_caching:
            return
        table = self._table
        full = np.minimum(table.num_computed[slots], table.num_tokens[slots]) // self._size
        for index in np.flatnonzero(full > table.num_remembered[slots]).tolist():
            slot, count = int(slots[index]), int(full[index])
            request = table.requests[slot]
            assert request is not None
            request.extend_digests(table.known_tokens(slot), count, self._size)
            for nth in range(int(table.num_remembered[slot]), count):
                self.pool.remember(int(table.block_table[slot, nth]), request.digests[nth])
            table.num_remembered[slot] = count

    def release(self, slot: int) -> None:
        """Takes all blocks of a row. Nothing of it is in the pool any more, so nothing of it is computed."""
        table = self._table
        self.remember_full(np.array([slot]))
        self.pool.release(table.block_table[slot, : table.num_blocks[slot]])
        table.num_blocks[slot] = 0
        table.num_computed[slot] = 0

    def quiet_steps(self, slots: np.ndarray) -> int:
        """For how many steps of one token each no row needs a block or fills one up."""
        table = self._table
        room = table.num_blocks[slots] * self._size - table.num_computed[slots]
        if self._prefix_caching:
            known = np.minimum(table.num_computed[slots], table.num_tokens[slots])
            room = np.minimum(room, (table.num_remembered[slots] + 1) * self._size - 1 - known)
        return int(room.min())
