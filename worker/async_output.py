"""A step's way back: the copy that was started, and the thread that waits for it. Importing this loads no torch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .failure import failure
from .messages import (
    CallReply,
    Failure,
    Logprobs,
    PromptLogprobs,
    Ready,
    StepOutput,
    StepReply,
    WorkerReply,
)
from .trace import OUTPUT_COPY, Lane

if TYPE_CHECKING:
    from .device import Event, TimedWork
    from .host_ring import Field, HostBuffer, RingEntry


_LIVENESS_SECONDS = 0.1


@dataclass(frozen=True)
class LogprobFields:
    """token_ids: int32 [m, 1 + k]. logprobs: float32 [m, 1 + k]. ranks: int32 [m]."""

    token_ids: Field
    logprobs: Field
    ranks: Field

    @classmethod
    def reserve(cls, m: int, k: int, buffer: HostBuffer) -> LogprobFields:
        return cls(
            buffer.reserve((m, 1 + k), np.int32),
            buffer.reserve((m, 1 + k), np.float32),
            buffer.reserve((m,), np.int32),
        )

    def read(self, buffer: HostBuffer) -> Logprobs:
        return Logprobs(*(buffer.array(f).copy() for f in (self.token_ids, self.logprobs, self.ranks)))


@dataclass(frozen=True)
class PromptPart:
    """Rows begin .. end of the step's prompt log-probabilities belong to row `row` of the step."""

    row: int
    first: int
    begin: int
    end: int


@dataclass(frozen=True)
class OutputLayout:
    """Where a step's output lies in its host buffer. n rows.

    num_sampled: int32 [n]. sampled: int32 [n, 1], None when no row samples. logprob_rows: int64 [m], the rows
    of the step that `logprobs` answers.
    """

    step_id: int
    num_sampled: np.ndarray
    sampled: Field | None = None
    logprobs: LogprobFields | None = None
    logprob_rows: np.ndarray | None = None
    prompt: LogprobFields | None = None
    prompt_parts: list[PromptPart] = field(default_factory=list)

    def read(self, buffer: HostBuffer, start_ns: int, end_ns: int, idle_ns: int) -> StepOutput:
        """Everything is copied out: the buffer serves another step afterwards."""
        n = len(self.num_sampled)
        return StepOutput(
            step_id=self.step_id,
            sampled=np.zeros((n, 1), np.int32) if self.sampled is None else buffer.array(self.sampled).copy(),
            num_sampled=self.num_sampled,
            logprobs=self._read_logprobs(n, buffer),
            prompt_logprobs=self._read_prompt(buffer),
            device_start_ns=start_ns,
            device_end_ns=end_ns,
            device_idle_ns=idle_ns,
        )

    def _read_logprobs(self, n: int, buffer: HostBuffer) -> Logprobs | None:
        if self.logprobs is None:
            return None
        values = self.logprobs.read(buffer)
        return Logprobs(*(self._spread(n, v) for v in (values.token_ids, values.logprobs, values.ranks)))

    def _spread(self, n: int, values: np.ndarray) -> np.ndarray:
        """From the rows that asked to all n rows, 0 for the others."""
        spread = np.zeros((n, *values.shape[1:]), values.dtype)
        spread[self.logprob_rows] = values
        return spread

    def _read_prompt(self, buffer: HostBuffer) -> list[PromptLogprobs]:
        if self.prompt is None:
            return []
        values = self.prompt.read(buffer)
        arrays = (values.token_ids, values.logprobs, values.ranks)
        return [
            PromptLogprobs(part.row, part.first, Logprobs(*(a[part.begin : part.end] for a in arrays)))
            for part in self.prompt_parts
        ]


@dataclass(frozen=True)
class DeviceWork:
    """A step's two parts on the device, and where to record when they ran. num_tokens: that the step computes."""

    forward: TimedWork
    sample: TimedWork
    num_tokens: int
    lane: Lane


class AsyncOutput:
    """The output of a step that may still be running. copied: the event after its copy to the host."""

    def __init__(self, entry: RingEntry, layout: OutputLayout, work: DeviceWork, copied: Event) -> None:
        self.step_id = layout.step_id
        self._entry = entry
        self._layout = layout
        self._work = work
        self._copied = copied
        self._output: StepOutput | None = None

    def get_output(self, timeout: float | None = None) -> StepOutput:
        """Waits for the step. Called by one thread.

        timeout: seconds. Raises: TimeoutError; whatever failed on the device.
        """
        if self._output is None:
            self._wait(timeout)
            start, forwarded = self._work.forward.times_ns()
            sampling, end = self._work.sample.times_ns()
            self._output = self._layout.read(self._entry.outputs, start, end, sampling - forwarded)
            self._entry.release()
            if self._work.lane.enabled:
                of_step = self.step_id, len(self._layout.num_sampled), self._work.num_tokens
                self._work.lane.add("forward", start, forwarded, *of_step)
                self._work.lane.add("sample", sampling, end, *of_step)
        return self._output

    def done(self) -> bool:
        return self._copied.done()

    def _wait(self, timeout: float | None) -> None:
        try:
            self._copied.wait(timeout)
        except TimeoutError:
            raise
        except BaseException:
            self._entry.release()
            raise


class WorkerAsyncOutputCopy(threading.Thread):
    """Waits for the outputs of steps in their order, and sends them: in a worker process, the only waiter.

    send: called in this thread alone, which owns the reply socket while it lives. What `send` raises ends the thread;
    `error` keeps it.
    lane: its lane of the trace. tells_tokens: False on ranks other than the output rank: they wait for their steps, and
    report what fails, but their results are everybody's.
    """

    def __init__(
        self,
        send: Callable[[WorkerReply], None],
        rank: int,
        lane: Lane | None = None,
        tells_tokens: bool = True,
    ) -> None:
        super().__init__(name="WorkerAsyncOutputCopy", daemon=True)
        self._tells_tokens = tells_tokens
        self.error: BaseException | None = None
        self._send = send
        self._rank = rank
        self._lane = lane or Lane(OUTPUT_COPY)
        self._queue: queue.SimpleQueue[AsyncOutput | WorkerReply | threading.Event | None] = queue.SimpleQueue()

    def put(self, item: AsyncOutput | WorkerReply) -> None:
        """From any thread. Sent after everything put before."""
        self._queue.put(item)

    def flush(self) -> None:
        """Waits until what was put before has been sent, and recorded."""
        through = threading.Event()
        self._queue.put(through)
        while self.is_alive() and not through.wait(_LIVENESS_SECONDS):
            pass

    def close(self) -> None:
        """Sends what was put, then ends the thread and waits for it."""
        self._queue.put(None)
        if self.is_alive():
            self.join()

    def run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                    continue
                self._lane.begin()
                reply = self._reply(item)
                if self._tells_tokens or not isinstance(reply, StepReply):
                    self._send(reply)
                if isinstance(reply, StepReply):
                    self._lane.end("push", reply.output.step_id)
                # An output holds its step's host buffers: keep none while the queue is empty.
                del item
        except BaseException as error:
            self.error = error
            raise

    def _reply(self, item: AsyncOutput | WorkerReply) -> WorkerReply:
        if isinstance(item, (Ready, StepReply, CallReply, Failure)):
            return item
        try:
            output = item.get_output()
            self._lane.end("wait", output.step_id)
            return StepReply(output)
        except Exception as error:
            return failure(self._rank, error)
