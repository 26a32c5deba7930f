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

from ..config import ResolvedConfig
from ..errors import ConfigError
from ..executor.base import Executor, Future
from ..worker.messages import StepOutput, WorkerInfo
from ..worker.trace import ENGINE_CORE, Recorder
from .grammar import Grammar, GrammarGate
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
        self._gate = GrammarGate(grammar, self.scheduler.table)
        self._device_clock = DeviceClock(self.stats)
        self._stats_log = StatsLog(self.get_stats)
        executor.on_wait = self._stats_log.turn
        self._trace = Recorder(ENGINE_CORE)
        self._lane = self._trace.lane(ENGINE_CORE)
        unasked = not config.async_scheduling and config.settings.async_scheduling is None
        level = logging.WARNING if unasked else logging.INFO
        logger.log(level, "async scheduling: %s (%s)", "on" if config.async_scheduling else "off", config.async_reason)

    # ---- the loop -------------------------------------------------------------------------------

    def step(self) -> OutputBatch | None:
        """One turn: starts a step if the queue has room, else finishes the oldest. Returns what there is
        to tell the clients."""
        self._stats_log.turn()
        lane = self._lane
        if self._has_room():
            lane.begin()
            step = self.scheduler.schedule()
            if step is not None:
                lane.end("schedule", step.plan.step_id)
                self._start(step)
                lane.end("launch", step.plan.step_id)
                if self._has_room():
                    return None
        if not self._queue:
            assert not self.scheduler.num_unfinished, "requests are unfinished, but nothing runs and nothing can"
            return None
        oldest = self._queue.popleft()
        lane.begin()
        output = oldest.output.result()
        lane.end("wait", output.step_id)
        self._apply_early_aborts()
        batch = self.scheduler.update(oldest.step, output)
        if batch is not None:
            self._gate.advance(batch)
        self._device_clock.step_done(output.device_start_ns, output.device_end_ns, output.device_idle_ns)
        if self._unsampled and not self._gate.awaits_tokens(self._unsampled):
            self._sample(self._unsampled)
        lane.end("update", output.step_id)
        return batch

    def _has_room(self) -> bool:
        """A step that is not sampled yet must be before another one starts."""
        return len(self._queue) < self._max_in_flight and not self._unsampled

    def _start(self, step: ScheduledStep) -> None:
        """Launches the forward pass, then sampling: at once, or, when a structured request's last token is
        still in flight so that its mask cannot be known, after the step that samples it was processed."""
        self.executor.execute_model(step.plan)
        if self._gate.awaits_tokens(step):
            self.stats.deferred_samplings += 1
            self._unsampled = step
        else:
            self._sample(step)

    def _sample(self, step: ScheduledStep) -> None:
        self._unsampled = None
        self._queue.append(StepInFlight(step, self.executor.sample_tokens(self._gate.masks(step))))

    # ---- requests -------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> FinishedRequest | None:
        """Queues a request, or says why it can never run; the others are not touched."""
        return self.scheduler.add(request, structured=self._gate.constrains(request))

    def abort_requests(self, request_ids: Sequence[int]) -> None:
        """Ids that are unknown, because they have finished, are ignored."""
        self.scheduler.abort(request_ids)
        for request_id in request_ids:
            self._gate.finished(request_id)

    def has_work(self) -> bool:
        """False only when nothing is unfinished or in flight."""
        return bool(self.scheduler.num_unfinished or self._queue or self._unsampled)

    def idle(self) -> None:
        """The engine has run out of work and is about to wait for some."""
        self._device_clock.idle()
        self._stats_log.idle()

    def _apply_early_aborts(self) -> None:
        """Aborts that came while the step ran: its outputs for them are not wanted any more. The same abort also
        comes in order, through abort_requests: that one counts when this one came before its request."""
        while self.early_aborts:
            self.abort_requests([self.early_aborts.popleft()])

    # ---- utilities ------------------------------------------------------------------------------

    def utility(self, method: str, args: Sequence[Any]) -> Any:
        """What a client may ask by name. Raises: ValueError for an unknown name."""
        if method == "stats":
            self._stats_log.refresh_rate()
            return self.get_stats()
        if method == "reset_prefix_cache":
            return self.scheduler.reset_prefix_cache()
        if method == "collective_rpc":
            return self.executor.collective_rpc(*args)
        if method == "start_profile":
            self.executor.collective_rpc("start_profile")
            self._trace.start()
            return None
        if method == "stop_profile":
            return [msgspec.to_builtins(self._trace.stop()), *self.executor.collective_rpc("stop_profile")]
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
    limited_by = "the setting" if config.max_model_len_asked else "the model"
    if max_model_len < config.max_model_len:
        limited_by = f"the KV pool of {pool_tokens} tokens"
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
        max_model_len_from=limited_by,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        prefix_caching=settings.enable_prefix_caching,
        by_priority=settings.scheduling_policy == "priority",
        num_stages=settings.pipeline_parallel_size,
        plans_ahead=config.async_scheduling,
    )


def _info(config: ResolvedConfig, infos: Sequence[WorkerInfo], limits: SchedulerLimits) -> EngineInfo:
    return EngineInfo(
        pid=os.getpid(),
        worker_pids=[info.pid for info in infos],
        device=infos[0].device,
        num_kv_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        max_model_len_from=limits.max_model_len_from,
        async_scheduling=config.async_scheduling,
        async_reason=config.async_reason,
    )
