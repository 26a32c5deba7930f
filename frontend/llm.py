"""LLM: many prompts in, all their outputs out."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..engine_core.messages import AbortRequests, AddRequest, EngineFailed, EngineMessage, OutputBatch
from ..engine_core.stats import EngineStats
from ..errors import EngineDeadError, InvalidRequestError
from .engine_owner import EngineOwner
from .engine_setup import Engine, start_engine
from .output_processor import RequestState
from .outputs import RequestOutput
from .profile import Profile
from .request_processing import PreparedRequest, Prompt
from .sampling_params import SamplingParams
from .tokenizer import Message, conversations_of, render_chat

_GRACE_S = 1.0
"""How much longer than its caller the engine core waits for a call, so that the caller's own time-out comes first."""

Params = SamplingParams | Sequence[SamplingParams] | None


class _Closed:
    """What close() puts into the inbox, so that a generate() that waits there ends."""


class LLM(EngineOwner):
    """A model and the engine that runs it.

    model: a local folder or a Hugging Face hub id. settings: see EngineConfig.
    Use it as a context manager, or call close(). Methods may be called from any thread; generate() and chat()
    take turns. Raises: ConfigError when the model or a setting cannot be used, EngineDeadError.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._inbox: queue.SimpleQueue[EngineMessage | _Closed] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._names = count()
        self._dead: EngineDeadError | None = None
        self._closed = False
        self._engine = self._start(model, settings)

    def _start(self, model: str, settings: dict[str, Any]) -> Engine:
        return start_engine(model, settings, self._inbox.put)

    def stats(self) -> EngineStats:
        """What the engine has counted since it started, and its state now."""
        self._check_alive()
        return self._engine.client.stats()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests keep what they hold."""
        self._check_alive()
        self._engine.client.call("reset_prefix_cache")

    def collective_rpc(
        self, method: str | Callable[..., Any], timeout: float | None = None, args: Sequence[Any] = ()
    ) -> list[Any]:
        """Calls a method of every worker by name, or method(worker, *args); plain results, by rank.

        timeout: seconds. Raises: StepaheadError with the worker's own traceback, TimeoutError.
        """
        self._check_alive()
        held = None if timeout is None else timeout + _GRACE_S
        return self._engine.client.call("collective_rpc", method, list(args), held, timeout=timeout)

    def start_profile(self) -> None:
        """Records what every process and the device do, until stop_profile()."""
        self._check_alive()
        self._engine.start_profile()

    def stop_profile(self, path: str | Path | None = "trace.json") -> Profile:
        """Ends the recording. path: where to write it for ui.perfetto.dev, a file, or a folder, which gets a
        trace.json; None writes nothing.

        Returns: the recording.
        """
        self._check_alive()
        return self._engine.stop_profile(path)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in order.

        prompts: text, token ids, {"prompt": …} or {"prompt_token_ids": …}, or a list of such. sampling_params,
        priority: one for all, or one a prompt. use_tqdm: a progress bar on stderr, or what makes one.
        Raises: InvalidRequestError, before anything is sent; EngineDeadError. After KeyboardInterrupt the
        requests are aborted and the engine stays usable.
        """
        return self._generate(_prompt_list(prompts), sampling_params, use_tqdm, priority, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: int | Sequence[int] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """generate() on conversations, through the model's chat template.

        messages: one conversation, or a list of them; a message is {"role": …, "content": …}, its content text or
        a list of parts {"type": "text", "text": …}, joined by line ends.
        Raises: InvalidRequestError also when there is no chat template; EngineDeadError.
        """
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = [
            render_chat(
                tokenizer,
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations_of(messages)
        ]
        return self._generate(prompts, sampling_params, use_tqdm, priority, add_special_tokens=False)

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: Params,
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int] | None,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        with self._turn:
            self._check_alive()
            default = SamplingParams() if sampling_params is None else sampling_params
            params = _one_each("sampling_params", default, len(prompts))
            priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
            prepared = [
                self._engine.requests.prepare(prompt, own, own_priority, add_special_tokens)
                for prompt, own, own_priority in zip(prompts, params, priorities, strict=True)
            ]
            progress = _Progress(len(prepared), use_tqdm)
            states: list[RequestState] = []
            try:
                for request in prepared:
                    states.append(self._submit(request))
                self._wait(states, progress)
            except BaseException:
                self._abandon(states)
                raise
            finally:
                progress.close()
            return [state.take_output() for state in states]

    def _submit(self, prepared: PreparedRequest) -> RequestState:
        state = self._engine.outputs.add(str(next(self._names)), prepared)
        for request in prepared.engine_requests:
            self._engine.client.send(AddRequest(request))
        return state

    def _wait(self, states: list[RequestState], progress: _Progress) -> None:
        running = len(states)
        while running:
            message = self._inbox.get()
            if isinstance(message, OutputBatch):
                updated, aborts = self._engine.outputs.process(message)
                if aborts:
                    self._engine.client.send(AbortRequests(aborts))
                for state in updated:
                    if state.error is not None:
                        raise state.error
                    if state.finished:
                        running -= 1
                        progress.finished(state)
            elif isinstance(message, EngineFailed):
                self._dead = EngineDeadError(f"the engine died: {message.message}\n{message.traceback}".rstrip())
                raise self._dead
            elif isinstance(message, _Closed):
                raise EngineDeadError("the engine was closed while requests were running")

    def _abandon(self, states: list[RequestState]) -> None:
        """Takes back what still runs. What arrives for it later is ignored."""
        ids = self._engine.outputs.forget(states)
        if ids and self._dead is None and not self._closed:
            self._engine.client.send(AbortRequests(ids))

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDeadError("this LLM has been closed")
        if self._dead is not None:
            raise self._dead

    def close(self) -> None:
        """Ends the engine and its processes. A generate() that runs raises EngineDeadError. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._engine.client.close()
        self._inbox.put(_Closed())

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Progress:
    """A progress bar over finished requests, with the rates of prompt and generated tokens."""

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._bar: Any | None = None
        if not use_tqdm or not total:
            return
        make = use_tqdm if callable(use_tqdm) else _tqdm()
        self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_rates(0, 0, 1.0))
        self._start = time.monotonic()
        self._input = self._output = 0

    def finished(self, state: RequestState) -> None:
        if self._bar is None:
            return
        self._input += len(state.prompt_token_ids)
        self._output += sum(len(sequence.token_ids) for sequence in state.sequences)
        elapsed = max(time.monotonic() - self._start, 1e-6)
        self._bar.set_postfix_str(_rates(self._input, self._output, elapsed), refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _tqdm() -> Callable[..., Any]:
    from tqdm import tqdm

    return tqdm


def _rates(num_input: int, num_output: int, seconds: float) -> str:
    return f"input: {num_input / seconds:.1f} tokens/s, output: {num_output / seconds:.1f} tokens/s"


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or many, as a list. A list of whole numbers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind in "iu":
        prompts = prompts.tolist()
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(f"prompts={prompts!r}: must be a prompt or a list of prompts")
    many = list(prompts)
    if many and all(isinstance(item, int) for item in many):
        return [many]  # type: ignore[list-item]  # ints only, as just seen
    return many  # type: ignore[return-value]  # prepare() checks what each one is


def _one_each(name: str, value: Any, total: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * total
    if len(value) != total:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {total} prompts: give one, or one a prompt")
    return list(value)
