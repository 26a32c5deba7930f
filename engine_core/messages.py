"""The structs that cross front end and engine core. Importing this loads no torch."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ..worker.messages import Int64, Logprobs, SamplingOptions


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate (a user's request with n > 1 is n of these).

    request_id: chosen by the client, unique for its lifetime. prompt: int32 [num_prompt].
    max_tokens: sampled tokens at most. priority: lower runs first. cache_salt: prompts with different
    salts never share cached KV.
    """

    request_id: Int64
    prompt: np.ndarray
    options: SamplingOptions
    max_tokens: Int64
    priority: Int64 = 0
    cache_salt: str = ""


class AddRequest(msgspec.Struct, frozen=True, tag=1, array_like=True):
    request: EngineRequest


class AbortRequests(msgspec.Struct, frozen=True, tag=2, array_like=True):
    request_ids: list[int]


class UtilityCall(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """Run a named method of the engine core ("stats", "collective_rpc", "reset_prefix_cache")."""

    call_id: int
    method: str
    args: list[Any] = []


class Stop(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """Finish the process: drop what is running, stop the workers, exit."""


ClientMessage = AddRequest | AbortRequests | UtilityCall | Stop


class EngineInfo(msgspec.Struct, frozen=True, tag=1, array_like=True, kw_only=True):
    """The handshake: the engine is ready, and what it resolved.

    max_model_len_from: what limits it, for messages: "the setting", "the model" or "the KV pool of N tokens".
    """

    pid: int
    worker_pids: list[int]
    device: str
    num_kv_blocks: int
    block_size: int
    max_model_len: int
    max_model_len_from: str
    async_scheduling: bool
    async_reason: str


class StartFailure(msgspec.Struct, frozen=True, tag=2, array_like=True, kw_only=True):
    """The handshake when it fails. user_error: message alone is enough (a ConfigError)."""

    message: str
    traceback: str
    user_error: bool


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """reason: "stop", "length", "abort", or "error" (then message says why).
    stop_token: the token id that stopped it, when that was not by length."""

    request_id: int
    reason: str
    stop_token: int | None = None
    message: str = ""
    num_cached_tokens: int = 0


class RequestPromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """values: rows for prompt positions 1 .. num_prompt - 1, in order."""

    request_id: int
    values: Logprobs


class OutputBatch(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """The tokens one step delivered, for every request that got some.

    request_ids: int64 [n]. counts: int32 [n], tokens each got. tokens: int32 [sum(counts)], flat.
    logprobs: rows as `tokens`, only when some request asked; each request reads its own first columns.
    step_id: 0 when it comes from no step.
    """

    request_ids: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    finished: list[FinishedRequest] = []
    logprobs: Logprobs | None = None
    prompt_logprobs: list[RequestPromptLogprobs] = []
    step_id: int = 0

    @classmethod
    def of_finished(cls, finished: list[FinishedRequest]) -> OutputBatch:
        """No tokens, only ends."""
        none = np.empty(0, np.int32)
        return cls(np.empty(0, np.int64), none, none, finished)


class UtilityReply(msgspec.Struct, frozen=True, tag=4, array_like=True):
    call_id: int
    value: Any = None
    error: str = ""


class EngineFailed(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """The last message of a dying engine core."""

    message: str
    traceback: str


EngineMessage = EngineInfo | StartFailure | OutputBatch | UtilityReply | EngineFailed
