"""What LLM and AsyncLLM do alike: from a model's name and settings to a running engine and its tokenizer."""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..config import EngineConfig, ResolvedConfig, parse_settings, resolve
from ..engine_core.messages import EngineMessage
from ..executor.registry import executor_class
from ..worker.logs import phase
from ..worker.model_config import read_model_config
from ..worker.sockets import SIGNAL_CHECK_MS
from .detokenizer import DetokenizerFactory
from .engine_client import EngineClient
from .hub import resolve_folder
from .output_processor import OutputProcessor
from .profile import Profile, parse_processes, write_trace
from .request_processing import RequestProcessor
from .tokenizer import check_tokenizer_files, load_tokenizer

logger = logging.getLogger(__name__)

_BREAK_OFF_SECONDS = 5.0
"""How long an interpreter that ends waits for an import to let itself be broken off."""


@dataclass
class Engine:
    """A running engine, seen from the front end. tokenizer: None with skip_tokenizer_init."""

    config: ResolvedConfig
    client: EngineClient
    tokenizer: Any | None
    requests: RequestProcessor
    outputs: OutputProcessor

    def start_profile(self) -> None:
        self.client.call("start_profile")
        self.outputs.trace.start()

    def stop_profile(self, path: str | Path | None) -> Profile:
        """path: see LLM.stop_profile."""
        front_end = self.outputs.trace.stop()
        processes = [front_end, *parse_processes(self.client.call("stop_profile"))]
        profile = Profile("async" if self.client.info.async_scheduling else "sync", processes)
        if path is not None:
            write_trace(path, [profile])
        return profile


def start_engine(model: str, settings: dict[str, Any], on_message: Callable[[EngineMessage], None]) -> Engine:
    """Raises: ConfigError, mostly before any process is started, and never with one left behind; EngineDeadError."""
    config, tokenizer_folder = _with_folders(parse_settings(model, settings))
    resolved = resolve(
        config, read_model_config(config.model), executor_class(config.executor).supports_async_scheduling()
    )
    if tokenizer_folder is not None:
        check_tokenizer_files(tokenizer_folder)
    loading = _TokenizerLoad(tokenizer_folder)
    client: EngineClient | None = None
    try:
        with phase(logger, "the engine core and its workers"):
            client = EngineClient(resolved, on_message)
        tokenizer = loading.result()
        requests = RequestProcessor(resolved, client.info, tokenizer)
        outputs = OutputProcessor(None if tokenizer is None else DetokenizerFactory(tokenizer))
    except BaseException:
        if client is not None:
            client.close()
        raise
    return Engine(resolved, client, tokenizer, requests, outputs)


def _with_folders(config: EngineConfig) -> tuple[EngineConfig, str | None]:
    """The config with its model as a folder, and the tokenizer's folder."""
    folder = resolve_folder(config.model, config.revision)
    config = msgspec.structs.replace(config, model=folder)
    if config.skip_tokenizer_init:
        return config, None
    if config.tokenizer is None:
        return config, folder
    return config, resolve_folder(config.tokenizer, tokenizer_only=True)


class _TokenizerLoad:
    """Loads it in a thread: importing transformers takes about as long as the engine takes to start.

    Whoever gives up does not wait for it. It then goes on in the background, so that the imports are whole for a next
    try; only the end of the interpreter, which an import must not meet, breaks it off.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._tokenizer: Any | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="TokenizerLoad", daemon=True)
        if folder is not None:
            atexit.register(self._break_off)
            self._thread.start()

    def _run(self) -> None:
        assert self._folder is not None
        try:
            with phase(logger, "loading the tokenizer, beside the engine"):
                self._tokenizer = load_tokenizer(self._folder)
        except Exception as error:
            self._error = error

    def _break_off(self) -> None:
        raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
        deadline = time.monotonic() + _BREAK_OFF_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:  # what it imports may swallow one
            raise_in_thread(ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(SystemExit))
            self._thread.join(0.05)

    def result(self) -> Any | None:
        while self._folder is not None and self._thread.is_alive():
            self._thread.join(SIGNAL_CHECK_MS / 1000)
        atexit.unregister(self._break_off)
        if self._error is not None:
            raise self._error
        return self._tokenizer
