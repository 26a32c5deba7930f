"""Decides what each step computes. Steady decode is column arithmetic; Python runs per request only for
what changed: an admission, a full block, a stop, a preemption.

Synchronous scheduling is the same code with a queue of depth 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from ..worker.messages import Logprobs, NewRequest, StepOutput, StepPlan
from .block_pool import BlockPool
from .messages import EngineRequest, FinishedRequest, OutputBatch, RequestPromptLogprobs
from .request import Request, State
from .request_table import RequestTable
from .stats import EngineStats
from .waiting_queue import WaitingQueue

_NO_DRAFTS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_seqs: slots. max_batched_tokens: tokens a step. num_blocks, block_size: the KV pool."""

    max_seqs: int
    max_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    by_priority: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan and what must be remembered to read its result: the generation of each of its slots."""

    plan: StepPlan
    generations: np.ndarray


class Scheduler:
    """Owns the table, the pool and the waiting queue; nobody else changes them."""

    def __init__(self, limits: SchedulerLimits, stats: EngineStats) -> None:
        self.limits = limits
        self.stats = stats
        self.table = RequestTable(limits.max_seqs, limits.max_model_len, limits.block_size)
        self.pool = BlockPool(limits.num_blocks)
        self.waiting = WaitingQueue()
        self._by_id: dict[int, Request] = {}
        self._arrivals = 0
        self._num_steps = 0
        self._num_draining = 0

    # ---- requests come and go -------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return len(self._by_id)

    def add(self, message: EngineRequest) -> FinishedRequest | None:
        """Queues a request, or says why it can never run."""
        refusal = self._refusal(message)
        if refusal:
            return FinishedRequest(message.request_id, "error", message=refusal)
        prompt = np.ascontiguousarray(message.prompt, np.int32)
        request = Request(message, self._arrivals, prompt)
        self._arrivals += 1
        self._by_id[request.request_id] = request
        self.waiting.push(request, self._priority(request))
        return None

    def abort(self, request_ids: Iterable[int]) -> None:
        """Unknown ids are those that have finished meanwhile: ignored."""
        for request_id in request_ids:
            request = self._by_id.get(request_id)
            if request is None:
                continue
            if request.state is State.WAITING:
                self.waiting.remove(request)
            else:
                self.stats.aborted_rows += int(self.table.num_placeholders[request.slot])
            self.finish(request)

    def finish(self, request: Request) -> None:
        """The request leaves, from whatever state. Its rows in flight will find their generation gone."""
        if request.slot >= 0:
            if request.state is State.DRAINING:
                self._num_draining -= 1
            self._release_blocks(request.slot)
            self.table.free(request.slot)
        request.state = State.FINISHED
        del self._by_id[request.request_id]

    def _requeue(self, request: Request) -> None:
        """A preempted request of which nothing is in flight any more gives up its slot and may come back."""
        self._num_draining -= 1
        request.tokens = self.table.known_tokens(request.slot).copy()
        self.table.free(request.slot)
        request.state = State.WAITING
        self.waiting.push(request, self._priority(request))

    # ---- planning -------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can be computed before a step in flight lands."""
        table = self.table
        slots, num_query = self._schedule_running()
        appends = self._grow_blocks(slots, num_query)
        new_requests, chunks = self._admit_waiting(self.limits.max_batched_tokens - int(num_query.sum()))
        if new_requests:
            slots = np.concatenate([slots, np.array([new.slot for new in new_requests])])
            num_query = np.concatenate([num_query, np.array(chunks, num_query.dtype)])
        if not slots.size:
            return None
        computed = table.num_computed[slots] + num_query
        expected = table.num_tokens[slots] + table.num_placeholders[slots]
        samples = computed == expected
        self.stats.rows_beyond_limit += int((samples & (expected >= table.max_total[slots])).sum())
        table.num_computed[slots] = computed
        table.num_placeholders[slots] += samples
        if self.limits.prefix_caching:
            self._remember_full_blocks(slots)
        self._num_steps += 1
        self.stats.steps += 1
        self.stats.scheduled_tokens += int(num_query.sum())
        plan = StepPlan(
            self._num_steps, new_requests, *appends, slots.astype(np.int32), num_query.astype(np.int32), samples,
            _NO_DRAFTS, int(computed.max()),
        )  # fmt: skip
        return ScheduledStep(plan, table.generation[slots])

    def _schedule_running(self) -> tuple[np.ndarray, np.ndarray]:
        """(slots, num_query) of the running requests that get tokens, after preempting whom there is no
        block for. The last in order gives way, so the first always advances."""
        table, budget = self.table, self.limits.max_batched_tokens
        slots = table.order()
        expected = table.num_tokens[slots] + table.num_placeholders[slots]
        # A request whose tokens in flight reach its limit has nothing left to compute.
        pending = np.where(expected < table.max_total[slots], expected - table.num_computed[slots], 0)
        while True:
            ends = np.cumsum(pending)
            num_query = pending
            if ends.size and ends[-1] > budget:
                num_query = np.clip(budget - (ends - pending), 0, pending)
            if int(self._missing_blocks(slots, num_query).sum()) <= self.pool.num_free:
                break
            self._preempt(int(slots[-1]))
            slots, pending = slots[:-1], pending[:-1]
        if num_query.all():
            return slots, num_query
        chosen = num_query > 0
        return slots[chosen], num_query[chosen]

    def _missing_blocks(self, slots: np.ndarray, num_query: np.ndarray) -> np.ndarray:
        size = self.limits.block_size
        needed = (self.table.num_computed[slots] + num_query + (size - 1)) // size
        return np.maximum(needed - self.table.num_blocks[slots], 0)

    def _grow_blocks(self, slots: np.ndarray, num_query: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gives the rows the blocks they miss: (append_slots, append_blocks, append_index), int32 [m]."""
        table = self.table
        missing = self._missing_blocks(slots, num_query)
        growing = np.flatnonzero(missing)
        counts = missing[growing]
        rows = np.repeat(slots[growing], counts)
        blocks = self.pool.allocate(len(rows))
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        index = table.num_blocks[rows] + nth
        table.block_table[rows, index] = blocks
        table.num_blocks[slots[growing]] += counts
        return rows.astype(np.int32), blocks, index.astype(np.int32)

    def _preempt(self, slot: int) -> None:
        """Takes the blocks; tokens in flight still land and are kept."""
        request = self.table.requests[slot]
        assert request is not None
        self.stats.preemptions += 1
        self._release_blocks(slot)
        self.table.stop_running(slot)
        request.state = State.DRAINING
        self._num_draining += 1
        if not self.table.num_placeholders[slot]:
            self._requeue(request)

    # ---- admission ------------------------------------------------------------------------------

    def _admit_waiting(self, budget: int) -> tuple[list[NewRequest], list[int]]:
        """(messages, num_query) of the requests that enter in this step, budget: tokens left in it.

        Nobody enters while a preempted request drains: it is older, and its turn comes first.
        """
        messages: list[NewRequest] = []
        chunks: list[int] = []
        while budget > 0 and self.table.num_free and not self._num_draining:
            request = self.waiting.first()
            message = self._admit(request) if request else None
            if message is None:
                break
            chunks.append(min(len(message.token_ids) - message.num_computed, budget))
            budget -= chunks[-1]
            messages.append(message)
        return messages, chunks

    def _admit(self, request: Request) -> NewRequest | None:
        """Gives the request a slot and blocks for all its known tokens, or None when too few are free:
        after an admission every running request must still be able to grow by a block, or the newcomer
        would only be preempted again."""
        size, tokens = self.limits.block_size, request.tokens
        cached = self._cached_blocks(request)
        missing = -(-len(tokens) // size) - len(cached)
        spare = self.pool.num_free - self.pool.num_unheld(cached) - missing
        if spare < self.table.num_running:
            return None
        self.waiting.pop_first()
        self.pool.hold(cached)
        blocks = np.concatenate([np.array(cached, np.int32), self.pool.allocate(missing)])
        slot = self._enter_table(request, blocks, len(cached))
        self.stats.prefix_tokens += len(tokens)
        self.stats.prefix_hit_tokens += len(cached) * size
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = len(cached) * size
        options = request.message.options
        if options.prompt_logprobs is not None and not self.table.owes_prompt_logprobs[slot]:
            options = msgspec.structs.replace(options, prompt_logprobs=None)
        return NewRequest(slot, tokens, request.num_prompt, len(cached) * size, blocks, options)

    def _cached_blocks(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of the request already. The last token is always computed, since
        its logits are wanted; so is every prompt token whose log-probability is."""
        if not self.limits.prefix_caching or request.owes_prompt_logprobs:
            return []
        usable = (len(request.tokens) - 1) // self.limits.block_size
        request.extend_digests(request.tokens, usable, self.limits.block_size)
        return self.pool.find(request.digests[:usable])

    def _enter_table(self, request: Request, blocks: np.ndarray, num_cached: int) -> int:
        table = self.table
        max_total = min(request.num_prompt + request.message.max_tokens, self.limits.max_model_len)
        slot = table.admit(request, self._priority(request), max_total)
        table.block_table[slot, : len(blocks)] = blocks
        table.num_blocks[slot] = len(blocks)
        table.num_remembered[slot] = num_cached
        table.num_computed[slot] = num_cached * self.limits.block_size
        table.owes_prompt_logprobs[slot] = request.owes_prompt_logprobs
        request.state = State.RUNNING
        request.prompt_logprobs.clear()
        return slot

    # ---- results --------------------------------------------------------------------------------

    def update(self, step: ScheduledStep, output: StepOutput) -> OutputBatch | None:
        """Takes in what a step sampled: appends tokens, finds stops, frees. Rows whose request has left
        meanwhile are dropped. None when nobody is to be told anything."""
        table, slots = self.table, step.plan.slots
        alive = table.generation[slots] == step.generations
        self._collect_prompt_logprobs(output, slots, alive)
        rows = np.flatnonzero(alive & step.plan.samples)
        if not rows.size:
            return None
        slots = slots[rows]
        tokens = output.sampled[rows, 0]
        table.token_ids[slots, table.num_tokens[slots]] = tokens
        table.num_tokens[slots] += 1
        table.num_placeholders[slots] -= 1
        assert table.num_placeholders[slots].min() >= 0, "a token arrived that no placeholder stood for"
        self.stats.generated_tokens += len(rows)
        stopped = (table.stop_ids[slots] == tokens[:, None]).any(axis=1)
        ended = stopped | (table.num_tokens[slots] >= table.max_total[slots])
        request_ids = table.request_id[slots]
        prompt_logprobs = self._take_prompt_logprobs(slots[table.owes_prompt_logprobs[slots]])
        finished = [
            self._finish_sampled(int(slots[i]), int(tokens[i]) if stopped[i] else None)
            for i in np.flatnonzero(ended).tolist()
        ]
        if self._num_draining:
            self._requeue_drained(slots[~ended])
        return OutputBatch(
            request_ids,
            np.ones(len(rows), np.int32),
            tokens,
            finished,
            _take_rows(output.logprobs, rows),
            prompt_logprobs,
            step.plan.step_id,
        )

    def _finish_sampled(self, slot: int, stop_token: int | None) -> FinishedRequest:
        request = self.table.requests[slot]
        assert request is not None
        self.stats.wasted_rows += int(self.table.num_placeholders[slot])
        self.stats.finished += 1
        reason = "length" if stop_token is None else "stop"
        self.finish(request)
        return FinishedRequest(
            request.request_id, reason, stop_token=stop_token, num_cached_tokens=max(request.num_cached_tokens, 0)
        )

    def _requeue_drained(self, slots: np.ndarray) -> None:
        for slot in slots[~self.table.running[slots] & (self.table.num_placeholders[slots] == 0)].tolist():
            request = self.table.requests[slot]
            assert request is not None
            self._requeue(request)

    def _collect_prompt_logprobs(self, output: StepOutput, slots: np.ndarray, alive: np.ndarray) -> None:
        for part in output.prompt_logprobs:
            request = self.table.requests[slots[part.row]] if alive[part.row] else None
            if request is not None:
                request.prompt_logprobs.append(part.values)

    def _take_prompt_logprobs(self, slots: np.ndarray) -> list[RequestPromptLogprobs]:
        """Those of requests that have just sampled their first token: their prompt is complete."""
        taken = []
        self.table.owes_prompt_logprobs[slots] = False
        for slot in slots.tolist():
            request = self.table.requests[slot]
            assert request is not None
            request.prompt_logprobs_sent = True
            if request.prompt_logprobs:
                taken.append(RequestPromptLogprobs(request.request_id, _concatenate(request.prompt_logprobs)))
                request.prompt_logprobs.clear()
        return taken

    # ---- blocks ---------------------------------------------------------------------------------

    def _remember_full_blocks(self, slots: np.ndarray) -> None:
        """Makes blocks findable whose tokens are all known and whose KV a started step computes: later
        steps may read them, since the device runs steps in order."""
        table = self.table
        full = np.minimum(table.num_computed[slots], table.num_tokens[slots]) // self.limits.block_size
        for index in np.flatnonzero(full > table.num_remembered[slots]).tolist():
            slot, count = int(slots[index]), int(full[index])
            request = table.requests[slot]
            assert request is not None
            request.extend_digests(table.known_tokens(slot), count, self.limits.block_size)
            for nth in range(int(table.num_remembered[slot]), count):
                self.pool.remember(int(table.block_table[slot, nth]), request.digests[nth])
            table.num_remembered[slot] = count

    def _release_blocks(self, slot: int) -> None:
        if self.limits.prefix_caching:
            self._remember_full_blocks(np.array([slot]))
        self.pool.release(self.table.block_table[slot, : self.table.num_blocks[slot]])
        self.table.num_blocks[slot] = 0
        # Nothing of a draining request is in the pool: what it computed does not count any more.
        self.table.num_computed[slot] = 0

    # ---- small questions ------------------------------------------------------------------------

    def _priority(self, request: Request) -> int:
        return request.message.priority if self.limits.by_priority else 0

    def _refusal(self, message: EngineRequest) -> str:
        """Why the request can never run; empty when it can."""
        if message.request_id in self._by_id:
            return f"request id {message.request_id} is already running"
        if not len(message.prompt):
            return "the prompt is empty"
        if len(message.prompt) >= self.limits.max_model_len:
            return (
                f"the prompt has {len(message.prompt)} tokens; with max_model_len={self.limits.max_model_len} "
                f"(KV pool: {self.limits.num_blocks * self.limits.block_size} tokens) there is no room to answer"
            )
        if message.max_tokens < 1:
            return f"max_tokens={message.max_tokens}: must be at least 1"
        return ""


def _take_rows(logprobs: Logprobs | None, rows: np.ndarray) -> Logprobs | None:
    if logprobs is None:
        return None
    return Logprobs(logprobs.token_ids[rows], logprobs.logprobs[rows], logprobs.ranks[rows])


def _concatenate(parts: list[Logprobs]) -> Logprobs:
    return Logprobs(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )
