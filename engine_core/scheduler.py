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
from .kv_blocks import NO_APPENDS, KVBlocks
from .messages import EngineRequest, FinishedRequest, OutputBatch, RequestPromptLogprobs
from .request import Request, State
from .request_table import RequestTable
from .stats import EngineStats
from .step_shares import in_turn, within
from .waiting_queue import WaitingQueue

_NONE = _NO_DRAFTS = np.empty(0, np.int32)
_QUIET_ROWS = 32
"""With more rows than this, some row has something to do in nearly every step."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_seqs: slots. max_batched_tokens: tokens a step. max_model_len_from: what limits it, for messages.
    num_blocks, block_size: the KV pool. num_stages: of the pipeline. plans_ahead: whether a row may be planned
    whose last token is still in flight."""

    max_seqs: int
    max_batched_tokens: int
    max_model_len: int
    max_model_len_from: str
    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    by_priority: bool = False
    num_stages: int = 1
    plans_ahead: bool = True


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan and what must be remembered to read its result: the generation of each of its slots.

    all_sample: whether every row samples.
    """

    plan: StepPlan
    generations: np.ndarray
    all_sample: bool


class Scheduler:
    """Owns the table, the pool and the waiting queue; nobody else changes them."""

    def __init__(self, limits: SchedulerLimits, stats: EngineStats) -> None:
        self.limits = limits
        self.stats = stats
        self.table = RequestTable(limits.max_seqs, limits.max_model_len, limits.block_size)
        self.pool = BlockPool(limits.num_blocks)
        self.blocks = KVBlocks(self.table, self.pool, limits.block_size, limits.prefix_caching)
        self.waiting = WaitingQueue()
        self._by_id: dict[int, Request] = {}
        self._arrivals = 0
        self._num_steps = 0
        self._num_draining = 0
        self._num_owing_logprobs = 0
        self._ones = np.ones(limits.max_seqs, np.int32)
        self._pipelined = limits.num_stages > 1
        self._quiet_steps = 0
        self._quiet_order = self.table.order()
        self._quiet_step: ScheduledStep

    # ---- requests come and go -------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return len(self._by_id)

    def add(self, message: EngineRequest, structured: bool = False) -> FinishedRequest | None:
        """Queues a request, or says why it can never run. structured: sampled under a grammar."""
        refusal = self._refusal(message)
        if refusal:
            return FinishedRequest(message.request_id, "error", message=refusal)
        prompt = np.ascontiguousarray(message.prompt, np.int32)
        request = Request(message, self._arrivals, prompt, structured)
        self._arrivals += 1
        self._by_id[request.request_id] = request
        self._num_owing_logprobs += request.owes_prompt_logprobs
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
            self.blocks.release(request.slot)
            self.table.free(request.slot)
        request.state = State.FINISHED
        self._num_owing_logprobs -= request.owes_prompt_logprobs
        del self._by_id[request.request_id]

    def _requeue(self, request: Request) -> None:
        """A preempted request that awaits no more tokens gives up its slot and may come back."""
        self._num_draining -= 1
        request.tokens = self.table.known_tokens(request.slot).copy()
        self.table.free(request.slot)
        request.state = State.WAITING
        self.waiting.push(request, self._priority(request))

    def reset_prefix_cache(self) -> None:
        self.pool.forget_all()

    # ---- planning -------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can be computed before a step in flight lands."""
        if self._quiet_steps > 0 and self.table.order() is self._quiet_order and not self.waiting:
            return self._repeat()
        return self._plan()

    def _plan(self) -> ScheduledStep | None:
        table = self.table
        slots, num_query, appends = self._schedule_running()
        new_requests, chunks = self._admit_waiting(self.limits.max_batched_tokens - int(num_query.sum()))
        if self._pipelined and not (slots.size or new_requests) and self.limits.plans_ahead:
            slots, num_query, appends = self._schedule_running(early=True)
        if new_requests:
            slots = np.concatenate([slots, np.array([new.slot for new in new_requests])])
            num_query = np.concatenate([num_query, np.array(chunks, np.int32)])
        if not slots.size:
            return None
        computed = table.num_computed[slots] + num_query
        expected = table.num_tokens[slots] + table.num_placeholders[slots]
        samples = computed == expected
        self.stats.rows_beyond_limit += int(np.count_nonzero(samples & (expected >= table.max_total[slots])))
        table.num_computed[slots] = computed
        table.num_placeholders[slots] += samples
        self.blocks.remember_full(slots)
        rows = slots.astype(np.int32)
        plan = StepPlan(
            self._next_step_id(int(num_query.sum())), new_requests, *appends, rows, num_query, samples,
            _NO_DRAFTS, int(computed.max()),
        )  # fmt: skip
        step = ScheduledStep(plan, table.generation[slots], bool(samples.all()))
        if self._pipelined:
            table.sampled_step[slots[samples]] = plan.step_id
        elif len(slots) <= _QUIET_ROWS:
            self._look_for_quiet(step)
        return step

    def _look_for_quiet(self, step: ScheduledStep) -> None:
        """Finds out how often this step can be repeated: the same rows, one token further."""
        table, slots = self.table, self.table.order()
        self._quiet_steps, self._quiet_order, self._quiet_step = 0, slots, step
        if len(slots) == len(step.plan.slots) and step.all_sample:
            unasked = table.max_total[slots] - table.num_tokens[slots] - table.num_placeholders[slots]
            self._quiet_steps = min(int(unasked.min()), self.blocks.quiet_steps(slots))
            ones = np.ones(len(slots), np.int32)
            plan = msgspec.structs.replace(
                step.plan, new_requests=[], slots=slots.astype(np.int32), num_query=ones,
                append_slots=_NONE, append_blocks=_NONE, append_index=_NONE,
            )  # fmt: skip
            self._quiet_step = ScheduledStep(plan, table.generation[slots], True)

    def _repeat(self) -> ScheduledStep:
        """Nothing has come, gone, grown or filled a block: every row decodes one more token."""
        slots, last = self._quiet_order, self._quiet_step
        self.table.num_computed[slots] += 1
        self.table.num_placeholders[slots] += 1
        self._quiet_steps -= 1
        plan = msgspec.structs.replace(
            last.plan, step_id=self._next_step_id(len(slots)), max_seq_len=last.plan.max_seq_len + 1
        )
        self._quiet_step = ScheduledStep(plan, last.generations, True)
        return self._quiet_step

    def _next_step_id(self, num_tokens: int) -> int:
        self.stats.steps += 1
        self.stats.scheduled_tokens += num_tokens
        self._num_steps += 1
        return self._num_steps

    def _schedule_running(
        self, early: bool = False
    ) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(slots, num_query, appends) of the running requests that get tokens, after preempting whom there
        is no block for. The last in order gives way, so the first always advances. early: see in_turn."""
        table, budget = self.table, self.limits.max_batched_tokens
        slots = table.order()
        if not slots.size:
            return slots, _NONE, NO_APPENDS
        computed = table.num_computed[slots]
        expected = table.num_tokens[slots] + table.num_placeholders[slots]
        # A request whose tokens in flight reach its limit has nothing left to compute.
        pending = (expected - computed) * (expected < table.max_total[slots])
        if self._pipelined:
            pending = in_turn(table, slots, pending, self._num_steps + 1, self.limits.num_stages, early)
        while slots.size:
            num_query = within(budget, pending)
            missing = self.blocks.missing(slots, computed + num_query)
            total = int(missing.sum())
            if total <= self.pool.num_free:
                break
            self._preempt(int(slots[-1]))
            slots, pending, computed = slots[:-1], pending[:-1], computed[:-1]
        else:
            return slots, _NONE, NO_APPENDS
        appends = self.blocks.grow(slots, missing) if total else NO_APPENDS
        if num_query.all():
            return slots, num_query, appends
        chosen = num_query > 0
        return slots[chosen], num_query[chosen], appends

    def _preempt(self, slot: int) -> None:
        """Takes the blocks; tokens in flight still land and are kept."""
        request = self.table.requests[slot]
        assert request is not None
        self.stats.preemptions += 1
        self.blocks.release(slot)
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
        cached = self.blocks.find_cached(request)
        if self.blocks.spare_after(request, cached) < self.table.num_running:
            return None
        self.waiting.pop_first()
        max_total = min(request.num_prompt + request.message.max_tokens, self.limits.max_model_len)
        slot = self.table.admit(request, self._priority(request), max_total)
        blocks = self.blocks.enter(slot, cached)
        request.state = State.RUNNING
        request.prompt_logprobs.clear()
        num_cached = len(cached) * self.limits.block_size
        self.stats.prefix_tokens += len(request.tokens)
        self.stats.prefix_hit_tokens += num_cached
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached
        options = request.message.options
        if request.prompt_logprobs_sent:
            options = msgspec.structs.replace(options, prompt_logprobs=None)
        return NewRequest(slot, request.tokens, request.num_prompt, num_cached, blocks, options)

    # ---- results --------------------------------------------------------------------------------

    def update(self, step: ScheduledStep, output: StepOutput) -> OutputBatch | None:
        """Takes in what a step sampled: appends tokens, finds stops, frees. Rows whose request has left
        meanwhile are dropped. None when nobody is to be told anything."""
        table, slots = self.table, step.plan.slots
        alive = table.generation[slots] == step.generations
        tokens = output.sampled[:, 0]
        logprobs = output.logprobs
        if output.prompt_logprobs:
            self._collect_prompt_logprobs(output, slots, alive)
        if not (step.all_sample and alive.all()):
            rows = np.flatnonzero(alive & step.plan.samples)
            if not rows.size:
                return None
            slots, tokens, logprobs = slots[rows], tokens[rows], _take_rows(logprobs, rows)
        num_tokens = table.num_tokens[slots]
        table.token_ids[slots, num_tokens] = tokens
        num_tokens += 1
        table.num_tokens[slots] = num_tokens
        placeholders = table.num_placeholders[slots] - 1
        assert (placeholders >= 0).all(), "a token arrived that no placeholder stood for"
        table.num_placeholders[slots] = placeholders
        self.stats.generated_tokens += len(slots)
        request_ids = table.request_id[slots]
        prompt_logprobs = self._take_prompt_logprobs(slots) if self._num_owing_logprobs else []
        is_stop = table.stop_ids[slots] == tokens[:, None]
        ended = num_tokens >= table.max_total[slots]
        finished: list[FinishedRequest] = []
        if ended.any() or is_stop.any():
            stopped = is_stop.any(axis=1)
            ended |= stopped
            for i in np.flatnonzero(ended).tolist():
                finished.append(self._finish_sampled(int(slots[i]), int(tokens[i]) if stopped[i] else None))
        if self._num_draining:
            self._requeue_drained(slots[~ended])
        counts = self._ones[: len(slots)]
        return OutputBatch(request_ids, counts, tokens, finished, logprobs, prompt_logprobs, step.plan.step_id)

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
        for slot in slots.tolist():
            request = self.table.requests[slot]
            assert request is not None
            if request.owes_prompt_logprobs:
                request.prompt_logprobs_sent = True
                self._num_owing_logprobs -= 1
                if request.prompt_logprobs:
                    taken.append(RequestPromptLogprobs(request.request_id, _whole_prompt(request)))
                    request.prompt_logprobs.clear()
        return taken

    # ---- small questions ------------------------------------------------------------------------

    def _priority(self, request: Request) -> int:
        return request.message.priority if self.limits.by_priority else 0

    def _refusal(self, message: EngineRequest) -> str:
        """Why the request can never run; empty when it can."""
        if message.request_id in self._by_id:
            return f"request id {message.request_id} is already running"
        if message.prompt.ndim != 1 or message.prompt.dtype.kind != "i":
            return f"the prompt must be one row of token ids, not {message.prompt.shape} of {message.prompt.dtype}"
        if not len(message.prompt):
            return "the prompt is empty"
        if len(message.prompt) >= self.limits.max_model_len:
            return (
                f"the prompt has {len(message.prompt)} tokens: with one token to generate it exceeds "
                f"max_model_len={self.limits.max_model_len} (limited by {self.limits.max_model_len_from})"
            )
        if message.max_tokens < 1:
            return f"max_tokens={message.max_tokens}: must be at least 1"
        return ""


def _take_rows(logprobs: Logprobs | None, rows: np.ndarray) -> Logprobs | None:
    return logprobs and Logprobs(logprobs.token_ids[rows], logprobs.logprobs[rows], logprobs.ranks[rows])


def _whole_prompt(request: Request) -> Logprobs:
    """Of its chunks, each of which is as wide as the widest that any row of its step asked for."""
    parts, width = request.prompt_logprobs, 1 + (request.message.options.prompt_logprobs or 0)
    return Logprobs(
        np.concatenate([part.token_ids[:, :width] for part in parts]),
        np.concatenate([part.logprobs[:, :width] for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )
