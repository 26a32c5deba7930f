"""AsyncLLM: streams, many at once, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from ..engine_core.messages import AbortRequests, AddRequest, EngineFailed, EngineMessage, OutputBatch
from ..engine_core.stats import EngineStats
from ..errors import EngineDeadError, InvalidRequestError, StepaheadError
from .engine_client import EngineClient
from .engine_owner import EngineOwner
from .engine_setup import Engine, start_engine
from .output_processor import OutputProcessor, RequestState
from .outputs import RequestOutput
from .profile import Profile
from .request_processing import PreparedRequest, Prompt
from .sampling_params import RequestOutputKind, SamplingParams


class AsyncLLM(EngineOwner):
    """A model and the engine that runs it, for asyncio.

    model: a local folder or a Hugging Face hub id. settings: see EngineConfig. Construction blocks until the
    engine is ready. All streams run on one event loop, the one that uses it first; another may take over when that
    one is closed. Raises: ConfigError when the model or a setting cannot be used, EngineDeadError.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._hub = _Hub()
        self._names = count()
        self._engine = self._start(model, settings)
        self._hub.attach(self._engine)

    def _start(self, model: str, settings: dict[str, Any]) -> Engine:
        return start_engine(model, settings, self._hub.on_message)

    async def stats(self) -> EngineStats:
        """What the engine has counted since it started, and its state now."""
        return await asyncio.to_thread(self._engine.client.stats)

    async def start_profile(self) -> None:
        """Records what every process and the device do, until stop_profile()."""
        await asyncio.to_thread(self._engine.start_profile)

    async def stop_profile(self, path: str | Path | None = "trace.json") -> Profile:
        """Ends the recording. path: where to write it for ui.perfetto.dev, a file, or a folder, which gets a
        trace.json; None writes nothing.

        Returns: the recording.
        """
        return await asyncio.to_thread(self._engine.stop_profile, path)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the request's output as it grows (sampling_params.output_kind says how much of it each time).

        A slow reader misses no text: several steps come as one output. Leaving the loop and closing the generator, or
        cancelling the task, aborts the request in the engine. add_special_tokens: False for a prompt that a chat
        template has made. Raises: InvalidRequestError, EngineDeadError.
        """
        hub = self._hub
        hub.enter()
        name = request_id if request_id is not None else f"request-{next(self._names)}"
        params = sampling_params or SamplingParams()
        prepared = self._engine.requests.prepare(prompt, params, priority, add_special_tokens)
        stream = hub.open(name, prepared)
        try:
            for request in prepared.engine_requests:
                self._engine.client.send(AddRequest(request))
            while True:
                await stream.wait()
                done = stream.state.finished
                if done or params.output_kind is not RequestOutputKind.FINAL_ONLY:
                    yield stream.state.take_output()
                if done:
                    return
        finally:
            hub.leave(stream)

    def close(self) -> None:
        """Ends the engine and its processes; streams raise EngineDeadError. Safe to call twice, from any thread."""
        self._hub.fail("this AsyncLLM has been closed")
        self._engine.client.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


class _Stream:
    """One generator's end of a request."""

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self.error: StepaheadError | None = None
        self._news = asyncio.Event()

    def wake(self) -> None:
        self._news.set()

    async def wait(self) -> None:
        """Until there is something new. Raises: what ended the request."""
        await self._news.wait()
        self._news.clear()
        error = self.error or self.state.error
        if error is not None:
            raise error


class _Hub:
    """Takes each batch of the engine from the client's I/O thread to the streams: one hop into the loop a batch.

    Everything but on_message() and fail() runs in the event loop. It does not hold the client, which ends its engine
    when it is forgotten; a running generator holds it.
    """

    def __init__(self) -> None:
        self._outputs: OutputProcessor | None = None
        self._client: Callable[[], EngineClient | None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[RequestState, _Stream] = {}
        self._names: set[str] = set()
        self._error: str | None = None

    def attach(self, engine: Engine) -> None:
        self._outputs = engine.outputs
        self._client = weakref.ref(engine.client)

    def on_message(self, message: EngineMessage) -> None:
        """In the client's I/O thread."""
        if isinstance(message, EngineFailed):
            self.fail(f"the engine died: {message.message}\n{message.traceback}".rstrip())
        else:
            self._in_loop(self._process, message)

    def fail(self, error: str) -> None:
        """Ends every stream, and refuses new ones. From any thread."""
        if self._error is None:
            self._error = error
        self._in_loop(self._fail_streams)

    def enter(self) -> None:
        """Checks that the caller may open a stream. Raises: EngineDeadError, StepaheadError in a second event loop."""
        if self._error is not None:
            raise EngineDeadError(self._error)
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise StepaheadError("this AsyncLLM is used by another event loop that still runs")
        self._loop = loop
        for stream in list(self._streams.values()):  # left by a loop that was closed under them
            self.leave(stream)

    def open(self, name: str, prepared: PreparedRequest) -> _Stream:
        assert self._outputs is not None
        if name in self._names:
            raise InvalidRequestError(f"request_id={name!r}: a request of that name is running")
        stream = _Stream(self._outputs.add(name, prepared))
        self._names.add(name)
        self._streams[stream.state] = stream
        return stream

    def leave(self, stream: _Stream) -> None:
        """The generator has ended, however it did."""
        assert self._outputs is not None
        if self._streams.pop(stream.state, None) is None:
            return
        self._names.discard(stream.state.request_id)
        self._abort(self._outputs.forget([stream.state]))

    def _abort(self, ids: list[int]) -> None:
        client = self._client()
        if ids and client is not None and self._error is None:
            with contextlib.suppress(EngineDeadError):  # on_message tells of its death
                client.send(AbortRequests(ids))

    def _process(self, message: EngineMessage) -> None:
        assert self._outputs is not None
        if not isinstance(message, OutputBatch):
            return
        updated, aborts = self._outputs.process(message)
        self._abort(aborts)
        for state in updated:
            stream = self._streams[state]
            final_only = state.params.output_kind is RequestOutputKind.FINAL_ONLY
            if state.finished or state.error is not None or not final_only:
                stream.wake()

    def _fail_streams(self) -> None:
        assert self._error is not None
        for stream in self._streams.values():
            stream.error = EngineDeadError(self._error)
            stream.wake()

    def _in_loop(self, function: Callable[..., None], *args: Any) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not loop.is_closed():
                raise
            # nobody is left to tell: the streams ended with their loop
