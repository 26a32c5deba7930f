"""From the engine's tokens to the user's outputs. Used by one thread at a time; owns the live requests.

Runs for every token of every request: mind its cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ..engine_core.messages import FinishedRequest, OutputBatch
from ..errors import InvalidRequestError, StepaheadError
from ..worker.messages import Logprobs
from ..worker.trace import FRONT_END, Recorder
from .detokenizer import Detokenizer, DetokenizerFactory
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from .request_processing import PreparedRequest
from .sampling_params import RequestOutputKind
from .stop_strings import StopStrings


class RequestState:
    """A user's request while it runs, and its result after. error: why it failed, when it did."""

    def __init__(self, request_id: str, prepared: PreparedRequest, factory: DetokenizerFactory | None) -> None:
        self.request_id = request_id
        self.prompt = prepared.prompt
        self.prompt_token_ids = prepared.prompt_token_ids
        self.params = prepared.params
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.num_cached_tokens: int | None = None
        self.error: StepaheadError | None = None
        asked = prepared.params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if asked else None
        self.sequences = [
            SequenceState(self, index, request.request_id, factory)
            for index, request in enumerate(prepared.engine_requests)
        ]
        self.num_running = len(self.sequences)

    @property
    def finished(self) -> bool:
        return self.num_running == 0

    def running_ids(self) -> list[int]:
        """Of the engine requests that are not finished."""
        return [sequence.engine_id for sequence in self.sequences if sequence.finish_reason is None]

    def take_output(self) -> RequestOutput:
        """What there is now: all of it, or with DELTA what was not taken yet.

        A running sequence's text stops short of what may turn out to be part of a stop string.
        """
        delta = self.params.output_kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[sequence.take_output(delta) for sequence in self.sequences],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )


class SequenceState:
    """One sequence of a request: an EngineRequest's tokens and text so far."""

    def __init__(self, request: RequestState, index: int, engine_id: int, factory: DetokenizerFactory | None) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.engine_id = engine_id
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self._detokenizer: Detokenizer | None = None
        if factory is not None and params.detokenize:
            self._detokenizer = factory.make(request.prompt_token_ids, params.skip_special_tokens)
        stops = params.stop_strings
        self._stops = StopStrings(stops) if stops else None
        self._taken_tokens = 0
        self._taken_text = 0

    def append(self, tokens: list[int]) -> int:
        """Takes tokens in order up to one that completes a stop string; then the sequence is finished.

        Returns: how many were taken.
        """
        detokenizer, stops = self._detokenizer, self._stops
        if stops is None or detokenizer is None:
            self.token_ids += tokens
            if detokenizer is not None:
                for token in tokens:
                    self.text += detokenizer.push(token)
            return len(tokens)
        for taken, token in enumerate(tokens, start=1):
            self.token_ids.append(token)
            new = detokenizer.push(token)
            if new and self._grow(stops, new):
                return taken
        return len(tokens)

    def _grow(self, stops: StopStrings, new: str) -> bool:
        """Adds text, then looks for a stop string that ends in it, unless min_tokens are yet to come."""
        searched = len(self.text)
        self.text += new
        if len(self.token_ids) <= self.request.params.min_tokens:
            return False
        match = stops.find(self.text, searched)
        if match is None:
            return False
        self.text = self.text[: match.end if self.request.params.include_stop_str_in_output else match.start]
        self._finish("stop", match.string)
        return True

    def end(self, finished: FinishedRequest) -> None:
        """The engine ended it. The token that stopped it is the last one of token_ids, and not yet in the text."""
        params = self.request.params
        stop_token = finished.stop_token
        text = ""
        if self._detokenizer is not None:
            if stop_token is not None and params.include_stop_str_in_output:
                text = self._detokenizer.push(stop_token)
            text += self._detokenizer.flush()
        if text and self._stops is not None and self._grow(self._stops, text):
            return
        if self._stops is None:
            self.text += text
        named = stop_token is not None and stop_token in (params.stop_token_ids or ())
        self._finish(finished.reason, stop_token if named else None)

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._detokenizer = None
        self.request.num_running -= 1

    def take_output(self, delta: bool) -> CompletionOutput:
        end = len(self.text)
        if (
            self._stops is not None
            and self.finish_reason is None
            and not self.request.params.include_stop_str_in_output
        ):
            end -= self._stops.open_tail(self.text)
        first_token, first_char = (self._taken_tokens, self._taken_text) if delta else (0, 0)
        self._taken_tokens, self._taken_text = len(self.token_ids), end
        return CompletionOutput(
            index=self.index,
            text=self.text[first_char:end],
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[first_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class OutputProcessor:
    """factory: None without a tokenizer; then all texts are empty. trace: what process() takes, while it records."""

    def __init__(self, factory: DetokenizerFactory | None) -> None:
        self.trace = Recorder(FRONT_END)
        self._lane = self.trace.lane(FRONT_END)
        self._factory = factory
        self._live: dict[int, SequenceState] = {}

    def add(self, request_id: str, prepared: PreparedRequest) -> RequestState:
        state = RequestState(request_id, prepared, self._factory)
        for sequence in state.sequences:
            self._live[sequence.engine_id] = sequence
        return state

    def forget(self, states: Iterable[RequestState]) -> list[int]:
        """Drops requests; whatever arrives for them later is ignored. Returns: engine ids to abort."""
        ids = [engine_id for state in states for engine_id in state.running_ids()]
        for engine_id in ids:
            self._live.pop(engine_id, None)
        return ids

    def process(self, batch: OutputBatch) -> tuple[list[RequestState], list[int]]:
        """Returns: the requests that have something new, and the engine ids to abort (a stop string came)."""
        self._lane.begin()
        now = time.monotonic()
        finished = {entry.request_id: entry for entry in batch.finished}
        updated: dict[RequestState, None] = {}
        aborts: list[int] = []
        for prompt in batch.prompt_logprobs:
            self._add_prompt_logprobs(prompt.request_id, prompt.values)
        tokens: list[int] = batch.tokens.tolist()
        start = 0
        for engine_id, count in zip(batch.request_ids.tolist(), batch.counts.tolist(), strict=True):
            sequence = self._live.get(engine_id)
            if sequence is not None:
                entry = finished.pop(engine_id, None)
                self._deliver(sequence, tokens[start : start + count], entry, start, batch.logprobs)
                metrics = sequence.request.metrics
                metrics.last_token_time = now
                if metrics.first_token_time is None:
                    metrics.first_token_time = now
                if sequence.finish_reason is not None:
                    del self._live[engine_id]
                    if entry is None:
                        aborts.append(engine_id)
                updated[sequence.request] = None
            start += count
        for entry in finished.values():
            sequence = self._live.pop(entry.request_id, None)
            if sequence is not None:
                self._end(sequence, entry)
                updated[sequence.request] = None
        self._lane.end("process", batch.step_id)
        return list(updated), aborts

    def _deliver(
        self, sequence: SequenceState, tokens: list[int], entry: FinishedRequest | None, row: int,
        logprobs: Logprobs | None,
    ) -> None:  # fmt: skip
        stopped = entry is not None and entry.stop_token is not None
        taken = sequence.append(tokens[:-1] if stopped else tokens)
        if sequence.finish_reason is None and entry is not None:
            if stopped:
                sequence.token_ids.append(tokens[-1])
                taken += 1
            self._end(sequence, entry)
        if sequence.logprobs is not None and logprobs is not None:
            self._add_logprobs(sequence, logprobs, row, row + taken)

    def _end(self, sequence: SequenceState, entry: FinishedRequest) -> None:
        request = sequence.request
        sequence.end(entry)
        if sequence.index == 0:
            request.num_cached_tokens = entry.num_cached_tokens
        if entry.reason == "error":
            request.error = InvalidRequestError(f"request {request.request_id}: {entry.message}")

    def _add_logprobs(self, sequence: SequenceState, values: Logprobs, first: int, end: int) -> None:
        assert sequence.logprobs is not None
        asked = sequence.request.params.logprobs or 0
        rows = self._token_logprobs(values, first, end, asked)
        for entries in rows:
            sequence.cumulative_logprob += next(iter(entries.values())).logprob
        sequence.logprobs += rows

    def _add_prompt_logprobs(self, engine_id: int, values: Logprobs) -> None:
        sequence = self._live.get(engine_id)
        if sequence is None or sequence.request.prompt_logprobs is None:
            return
        asked = sequence.request.params.prompt_logprobs or 0
        sequence.request.prompt_logprobs += self._token_logprobs(values, 0, len(values.ranks), asked)

    def _token_logprobs(self, values: Logprobs, first: int, end: int, asked: int) -> list[TokenLogprobs]:
        """Rows first .. end - 1; of each the chosen token and the `asked` most likely (-1: all there are)."""
        columns = values.token_ids.shape[1] if asked < 0 else 1 + asked
        token_ids = values.token_ids[first:end, :columns].tolist()
        logprobs = values.logprobs[first:end, :columns].tolist()
        ranks = values.ranks[first:end].tolist()
        result: list[TokenLogprobs] = []
        for row_ids, row_logprobs, rank in zip(token_ids, logprobs, ranks, strict=True):
            entries = {row_ids[0]: Logprob(row_logprobs[0], rank, self._token_text(row_ids[0]))}
            for place, (token_id, logprob) in enumerate(zip(row_ids[1:], row_logprobs[1:], strict=True), start=1):
                if token_id not in entries:
                    entries[token_id] = Logprob(logprob, place, self._token_text(token_id))
            result.append(entries)
        return result

    def _token_text(self, token_id: int) -> str | None:
        return None if self._factory is None else self._factory.token_text(token_id)
