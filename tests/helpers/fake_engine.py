"""An engine without processes and models: a thread that answers requests from a function, a token a step each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from stepahead.config import parse_settings, resolve
from stepahead.engine_core.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineRequest,
    FinishedRequest,
    OutputBatch,
)
from stepahead.engine_core.stats import EngineStats
from stepahead.errors import EngineDeadError
from stepahead.frontend.async_llm import AsyncLLM
from stepahead.frontend.detokenizer import DetokenizerFactory
from stepahead.frontend.engine_setup import Engine
from stepahead.frontend.llm import LLM
from stepahead.frontend.output_processor import OutputProcessor
from stepahead.frontend.request_processing import RequestProcessor
from stepahead.worker.model_config import ModelConfig

INFO = EngineInfo(
    pid=1, worker_pids=[], device="cpu", num_kv_blocks=8, block_size=16, max_model_len=100,
    max_model_len_from="the model",
    async_scheduling=True, async_reason="default; executor 'fake' supports it",
)  # fmt: skip


def batch(rows: Iterable[tuple[int, list[int]]], finished: Iterable[FinishedRequest] = (), **more: Any) -> OutputBatch:
    """rows: (engine request id, tokens)."""
    rows = list(rows)
    return OutputBatch(
        request_ids=np.array([request_id for request_id, _ in rows], np.int64),
        counts=np.array([len(tokens) for _, tokens in rows], np.int32),
        tokens=np.array([token for _, tokens in rows for token in tokens], np.int32),
        finished=list(finished),
        **more,
    )


Answer = Callable[[EngineRequest], Iterable[int]]


class FakeClient:
    """answer: the tokens of a request, as many as one likes; max_tokens and stop ids are applied here.

    sent: every message, in order. live: engine request ids that run.
    """

    info = INFO

    def __init__(self, on_message: Callable[[Any], None], answer: Answer) -> None:
        self.sent: list[Any] = []
        self.live: dict[int, tuple[EngineRequest, Iterator[int], int]] = {}
        self.closed = False
        self._on_message = on_message
        self._answer = answer
        self._lock = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: AddRequest | AbortRequests) -> None:
        with self._lock:
            if self.closed:
                raise EngineDeadError("the fake engine is gone")
            self.sent.append(message)
            if isinstance(message, AddRequest):
                request = message.request
                self.live[request.request_id] = request, iter(self._answer(request)), 0
            else:
                for request_id in message.request_ids:
                    self.live.pop(request_id, None)
            self._lock.notify()

    def stats(self) -> EngineStats:
        return EngineStats(device_busy_ns=1, device_span_ns=2)

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._lock.notify()

    def die(self) -> None:
        self.close()
        self._on_message(EngineFailed("a worker fell over", "Traceback: …"))

    def wait_idle(self) -> None:
        deadline = time.monotonic() + 5
        while self.live and time.monotonic() < deadline:
            time.sleep(0.002)
        assert not self.live

    @property
    def aborted(self) -> list[int]:
        return [i for message in self.sent if isinstance(message, AbortRequests) for i in message.request_ids]

    @property
    def added(self) -> list[EngineRequest]:
        return [message.request for message in self.sent if isinstance(message, AddRequest)]

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self.live and not self.closed:
                    self._lock.wait()
                if self.closed:
                    return
                message = self._step()
            self._on_message(message)
            time.sleep(0.0005)

    def _step(self) -> OutputBatch:
        rows, finished = [], []
        for request_id, (request, tokens, count) in list(self.live.items()):
            token = next(tokens)
            rows.append((request_id, [token]))
            self.live[request_id] = request, tokens, count + 1
            if token in request.options.stop_token_ids:
                finished.append(FinishedRequest(request_id, "stop", stop_token=token))
            elif count + 1 == request.max_tokens:
                finished.append(FinishedRequest(request_id, "length"))
        for entry in finished:
            del self.live[entry.request_id]
        return batch(rows, finished)


def fake_engine(
    on_message: Callable[[Any], None],
    tokenizer: Any | None,
    answer: Answer,
    **settings: Any,
) -> Engine:
    model = ModelConfig(architecture="Fake", vocab_size=600, max_position=100, eos_token_ids=[2])
    config = resolve(parse_settings("fake", settings), model, True)
    return Engine(
        config=config,
        client=FakeClient(on_message, answer),  # type: ignore[arg-type]
        tokenizer=tokenizer,
        requests=RequestProcessor(config, INFO, tokenizer),
        outputs=OutputProcessor(None if tokenizer is None else DetokenizerFactory(tokenizer)),
    )


class FakeLLM(LLM):
    def __init__(self, tokenizer: Any | None, answer: Answer, **settings: Any) -> None:
        self._fake = tokenizer, answer
        super().__init__("fake", **settings)

    def _start(self, model: str, settings: dict[str, Any]) -> Engine:
        return fake_engine(self._inbox.put, *self._fake, **settings)

    @property
    def client(self) -> FakeClient:
        return self._engine.client  # type: ignore[return-value]


class FakeAsyncLLM(AsyncLLM):
    def __init__(self, tokenizer: Any | None, answer: Answer, **settings: Any) -> None:
        self._fake = tokenizer, answer
        super().__init__("fake", **settings)

    def _start(self, model: str, settings: dict[str, Any]) -> Engine:
        return fake_engine(self._hub.on_message, *self._fake, **settings)

    @property
    def client(self) -> FakeClient:
        return self._engine.client  # type: ignore[return-value]
