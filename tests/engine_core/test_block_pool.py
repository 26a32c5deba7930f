from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepahead.engine_core.block_pool import BlockPool, block_digest, root_digest


def digests(*tokens: int, salt: str = "") -> list[bytes]:
    chain = [root_digest(salt)]
    for token in tokens:
        chain.append(block_digest(chain[-1], np.array([token], np.int32)))
    return chain[1:]


def test_a_released_block_with_a_key_is_found_until_it_is_needed() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1).tolist()
    (key,) = digests(7)
    pool.remember(block, key)
    pool.release(np.array([block]))
    assert pool.num_free == 2
    assert pool.find([key]) == [block]
    pool.allocate(2)
    assert pool.find([key]) == []


def test_the_least_recently_used_content_goes_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    keys = [digests(token)[0] for token in (1, 2, 3)]
    for block, key in zip(blocks.tolist(), keys, strict=True):
        pool.remember(block, key)
        pool.release(np.array([block]))
    pool.hold(pool.find([keys[0]]))
    pool.release(blocks[:1])
    pool.allocate(1)
    assert pool.find([keys[1]]) == []
    assert pool.find([keys[0]])
    assert pool.find([keys[2]])


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    keys = digests(1, 2, 3)
    for block, key in zip(blocks.tolist(), keys, strict=True):
        pool.remember(block, key)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.find(keys) == blocks[:2].tolist()


def test_different_salts_never_share() -> None:
    assert not set(digests(1, 2, salt="a")) & set(digests(1, 2, salt="b"))


def test_equal_tokens_after_different_beginnings_have_different_keys() -> None:
    assert digests(1, 5)[1] != digests(2, 5)[1]


def test_releasing_twice_is_caught() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(blocks)


class PoolMachine(RuleBasedStateMachine):
    """Random holders; a block is never in two places, and content is found only where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.holdings: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            blocks = self.pool.allocate(count).tolist()
            held = {block for holding in self.holdings for block in holding}
            assert not held & set(blocks)
            for block in blocks:
                self.content.pop(block, None)
            self.holdings.append(blocks)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data(), value=st.integers(0, 5))
    def remember(self, data: st.DataObject, value: int) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.holdings))))
        (key,) = digests(value)
        self.pool.remember(block, key)
        if block not in self.content and key not in self.content.values():
            self.content[block] = key

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holdings) - 1))
        self.pool.release(np.array(self.holdings.pop(index), np.int32))

    @rule(value=st.integers(0, 5))
    def hold_found(self, value: int) -> None:
        found = self.pool.find(digests(value))
        assert [self.content[block] for block in found] == digests(value)[: len(found)]
        if found:
            self.pool.hold(found)
            self.holdings.append(found)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.content.clear()

    @invariant()
    def free_and_held_are_all(self) -> None:
        held = {block for holding in self.holdings for block in holding}
        assert self.pool.num_free + len(held) == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
