"""The table of live requests: one row (slot) each, numpy columns, so that a step costs arithmetic."""

from __future__ import annotations

import numpy as np

from .request import Request

_NO_TOKEN = -1
_NEVER = -(2**62)
_FIRST_STOP_COLUMNS = 4


class RequestTable:
    """Owns slots 0 .. num_slots - 1. Columns, one entry a slot:

    request_id int64, generation int64 (grows when a slot is freed, so that (slot, generation) names one
    stay), arrival int64, priority int64.
    num_prompt; num_tokens (known); num_placeholders (tokens that started steps will sample);
    num_computed (tokens whose KV is computed, or being computed by a started step); max_total (tokens at
    which the request ends); num_blocks (held); num_remembered (blocks with a key): int32.
    token_ids int32 [slots, max_model_len]; block_table int32 [slots, max_blocks];
    stop_ids int32 [slots, width], padded with -1. running: bool, False for free and draining slots.
    structured: bool, sampled under a grammar. sampled_step int64: the step that sampled last (kept for pipelines only).
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.num_slots = num_slots
        int32 = np.int32
        self.request_id = np.full(num_slots, -1, np.int64)
        self.generation = np.zeros(num_slots, np.int64)
        self.arrival = np.zeros(num_slots, np.int64)
        self.priority = np.zeros(num_slots, np.int64)
        self.num_prompt = np.zeros(num_slots, int32)
        self.num_tokens = np.zeros(num_slots, int32)
        self.num_placeholders = np.zeros(num_slots, int32)
        self.num_computed = np.zeros(num_slots, int32)
        self.max_total = np.zeros(num_slots, int32)
        self.num_blocks = np.zeros(num_slots, int32)
        self.num_remembered = np.zeros(num_slots, int32)
        self.running = np.zeros(num_slots, bool)
        self.structured = np.zeros(num_slots, bool)
        self.sampled_step = np.full(num_slots, _NEVER, np.int64)
        # np.zeros maps pages on first use: a table made for long contexts costs what is really written.
        self.token_ids = np.zeros((num_slots, max_model_len), int32)
        self.block_table = np.zeros((num_slots, -(-max_model_len // block_size)), int32)
        self.stop_ids = np.full((num_slots, _FIRST_STOP_COLUMNS), _NO_TOKEN, int32)
        self.requests: list[Request | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._order: np.ndarray | None = np.empty(0, np.int64)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return int(self.running.sum())

    def order(self) -> np.ndarray:
        """Running slots, first to be served first: by priority, then arrival. int64 [num_running]."""
        if self._order is None:
            slots = np.flatnonzero(self.running)
            self._order = slots[np.lexsort((self.arrival[slots], self.priority[slots]))]
        return self._order

    def admit(self, request: Request, priority: int, max_total: int) -> int:
        """Puts a waiting request into a slot. The caller sets blocks and num_computed."""
        slot = self._free.pop()
        tokens = request.tokens
        self.request_id[slot] = request.request_id
        self.arrival[slot] = request.arrival
        self.priority[slot] = priority
        self.num_prompt[slot] = request.num_prompt
        self.num_tokens[slot] = len(tokens)
        self.num_placeholders[slot] = 0
        self.num_computed[slot] = 0
        self.max_total[slot] = max_total
        self.num_blocks[slot] = 0
        self.num_remembered[slot] = 0
        self.structured[slot] = request.structured
        self.sampled_step[slot] = _NEVER
        self.token_ids[slot, : len(tokens)] = tokens
        self._set_stop_ids(slot, request.message.options.stop_token_ids)
        self.requests[slot] = request
        request.slot = slot
        self.running[slot] = True
        self._order = None
        return slot

    def stop_running(self, slot: int) -> None:
        """The slot is scheduled no more, but still owned (draining)."""
        self.running[slot] = False
        self._order = None

    def free(self, slot: int) -> None:
        """The slot may be reused; results still in flight for it are recognised by their generation."""
        request = self.requests[slot]
        assert request is not None, f"slot {slot} was freed twice"
        request.slot = -1
        self.requests[slot] = None
        self.request_id[slot] = -1
        self.running[slot] = False
        self.generation[slot] += 1
        self._free.append(slot)
        self._order = None

    def known_tokens(self, slot: int) -> np.ndarray:
        """int32 [num_tokens], a view."""
        return self.token_ids[slot, : self.num_tokens[slot]]

    def _set_stop_ids(self, slot: int, stop_ids: list[int]) -> None:
        width = self.stop_ids.shape[1]
        if len(stop_ids) > width:
            more = np.full((self.num_slots, len(stop_ids) - width), _NO_TOKEN, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, more], axis=1)
        self.stop_ids[slot] = _NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
