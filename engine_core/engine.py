"""The step loop: plan a step ahead of the device, and wait only for the oldest step.

schedule → execute_model → [grammar masks] → sample_tokens → queue
queue not full and work left: come back first; otherwise wait for the OLDEST → aborts → update
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..config import ResolvedConfig
from ..errors import ConfigError
from ..executor.base import Executor, Future
from ..worker.messages import GrammarMasks, StepOutput, WorkerInfo
from .grammar import Grammar
from .messages import EngineInfo, EngineRequest, FinishedRequest, OutputBatch
from .scheduler import ScheduledStep, Scheduler, SchedulerLimits
from .stats import DeviceClock, EngineStats
from .stats_log import StatsLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A started step. Its result is looked at only when it is the oldest."""

    step: ScheduledStep
    output: Future[StepOutput]


class EngineCore:
    """Drives a scheduler and an executor. Used by one thread, except `early_aborts`.

    Raises (construction): ConfigError when the KV pool cannot hold what was asked for.
    """

    def __init__(self, config: ResolvedConfig, executor: Executor, grammar: Grammar | None = None) -> None:
        self.executor = executor
        self.grammar = grammar
        self.early_aborts: deque[int] = deque()
        self.stats = EngineStats(async_scheduling=config.async_scheduling, async_reason=config.async_reason)
        infos = executor.worker_infos()
        limits = _limits(config, infos)
        executor.initialize_cache(limits.num_blocks, limits.max_model_len)
        self.scheduler = Scheduler(limits, self.stats)
        self.info = _info(config, infos, limits)
        self._queue: deque[StepInFlight] = deque()
        self._max_in_flight = config.max_in_flight
        self._unsampled: ScheduledStep | None = None
        self._refused: list[FinishedRequest] = []
        self._device_clock = DeviceClock(self.stats)
        self._stats_log = StatsLog(self.get_stats)
        executor.on_wait = self._stats_log.turn
        logger.info("async scheduling: %s (%s)", "on" if config.async_scheduling else "off", config.async_reason)

    # ---- the loop -------------------------------------------------------------------------------

    def step(self) -> OutputBatch | None:
        """One turn: starts a step if the queue has room, else finishes the oldest. Returns what there is
        to tell the clients."""
        self._stats_log.turn()
        if len(self._queue) < self._max_in_flight and not self._unsampled:
            step = self.scheduler.schedule()
            if step is not None:
                self._start(step)
                if len(self._queue) < self._max_in_flight and not self._unsampled:
                    return self._take_refused()
        if not self._queue:
            return self._take_refused()
        oldest = self._queue.popleft()
        output = oldest.output.result()
        self._apply_early_aborts()
        batch = self.scheduler.update(oldest.step, output)
        self._device_clock.step_done(output.device_start_ns, output.device_end_ns)
        self._tell_grammar(batch)
        if self._unsampled and not self._awaits_tokens(self._unsampled):
            self._sample(self._unsampled)
        return self._take_refused(batch)

    def _start(self, step: ScheduledStep) -> None:
        """Launches the forward pass, then sampling: at once, or, when a structured request's last token is
        still in flight so that its mask cannot be known, after the step that samples it was processed."""
        self.executor.execute_model(step.plan)
        if self._awaits_tokens(step):
            self.stats.deferred_samplings += 1
            self._unsampled = step
        else:
            self._sample(step)

    def _sample(self, step: ScheduledStep) -> None:
        self._unsampled = None
        self._queue.append(StepInFlight(step, self.executor.sample_tokens(self._masks(step))))

    # ---- grammars -------------------------------------------------------------------------------

    def _structured_rows(self, step: ScheduledStep) -> np.ndarray:
        """Indices of the plan's rows that sample under a grammar and whose request is still here."""
        assert self.grammar is not None
        slots = step.plan.slots
        alive = self.scheduler.table.generation[slots] == step.generations
        ids = self.scheduler.table.request_id[slots]
        rows = np.flatnonzero(alive & step.plan.samples).tolist()
        return np.array([row for row in rows if self.grammar.constrains(int(ids[row]))], np.int32)

    def _awaits_tokens(self, step: ScheduledStep) -> bool:
        """Whether a structured row's previous token is in flight: placeholders besides this step's own."""
        if not self.grammar or not self._queue:
            return False
        slots = step.plan.slots[self._structured_rows(step)]
        return bool((self.scheduler.table.num_placeholders[slots] > 1).any())

    def _masks(self, step: ScheduledStep) -> GrammarMasks | None:
        rows = self._structured_rows(step) if self.grammar else None
        if self.grammar is None or rows is None or not rows.size:
            return None
        return GrammarMasks(rows, self.grammar.masks(self.scheduler.table.request_id[step.plan.slots[rows]]))

    def _tell_grammar(self, batch: OutputBatch | None) -> None:
        if self.grammar and batch:
            self.grammar.advance(batch.request_ids, batch.counts, batch.tokens)
            for finished in batch.finished:
                self.grammar.finished(finished.request_id)

    # ---- requests -------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """A request that can never run is refused in the next outputs; the others are not touched."""
        refusal = self.scheduler.add(request)
        if refusal:
            self._refused.append(refusal)

    def abort_requests(self, request_ids: Sequence[int]) -> None:
        self.scheduler.abort(request_ids)
        if self.grammar:
            for request_id in request_ids:
                self.grammar.finished(request_id)

    def has_work(self) -> bool:
        """False only when nothing is unfinished, in flight, or waiting to be told."""
        return bool(self.scheduler.num_unfinished or self._queue or self._unsampled or self._refused)

    def idle(self) -> None:
        """There is no work: the time until there is some does not count."""
        self._device_clock.idle()
        self._stats_log.idle()

    def _apply_early_aborts(self) -> None:
        """Aborts that came while the step ran: its outputs for them are not wanted any more."""
        while self.early_aborts:
            self.abort_requests([self.early_aborts.popleft()])

    def _take_refused(self, batch: OutputBatch | None = None) -> OutputBatch | None:
        if not self._refused:
            return batch
        refused, self._refused = self._refused, []
        if batch is None:
            empty = np.empty(0, np.int32)
            return OutputBatch(np.empty(0, np.int64), empty, empty, refused)
        return msgspec.structs.replace(batch, finished=batch.finished + refused)

    # ---- utilities ------------------------------------------------------------------------------

    def utility(self, method: str, args: Sequence[Any]) -> Any:
        """What a client may ask by name. Raises: ValueError for an unknown name."""
        if method == "stats":
            self._stats_log.refresh_rate()
            return self.get_stats()
        if method == "reset_prefix_cache":
            return self.scheduler.pool.forget_all()
        if method == "collective_rpc":
            return self.executor.collective_rpc(*args)
        raise ValueError(f"the engine has no method {method!r}")

    def get_stats(self) -> EngineStats:
        """The live statistics, with the state up to date."""
        stats, scheduler = self.stats, self.scheduler
        stats.running = scheduler.table.num_running
        stats.waiting = len(scheduler.waiting)
        stats.free_blocks = scheduler.pool.num_free
        stats.total_blocks = scheduler.pool.num_blocks
        return stats

    def shutdown(self) -> None:
        self.executor.shutdown()


def _limits(config: ResolvedConfig, infos: Sequence[WorkerInfo]) -> SchedulerLimits:
    settings = config.settings
    num_blocks = min(info.kv_blocks for info in infos)
    pool_tokens = num_blocks * settings.block_size
    max_model_len = min(config.max_model_len, pool_tokens)
    if config.max_model_len_asked and max_model_len < config.max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len} does not fit the KV pool of {pool_tokens} tokens "
            f"({num_blocks} blocks): lower it, or raise kv_cache_memory_bytes"
        )
    if max_model_len < 2:
        raise ConfigError(
            f"the KV pool holds {pool_tokens} tokens, too few for any request: raise kv_cache_memory_bytes"
        )
    return SchedulerLimits(
        max_seqs=settings.max_num_seqs,
        max_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        prefix_caching=settings.enable_prefix_caching,
        by_priority=settings.scheduling_policy == "priority",
    )


def _info(config: ResolvedConfig, infos: Sequence[WorkerInfo], limits: SchedulerLimits) -> EngineInfo:
    return EngineInfo(
        pid=os.getpid(),
        worker_pids=[info.pid for info in infos],
        device=infos[0].device,
        num_kv_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        async_scheduling=config.async_scheduling,
        async_reason=config.async_reason,
    )
