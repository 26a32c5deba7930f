"""Every setting, and how None and "auto" are resolved. Importing this loads no torch."""

from __future__ import annotations

import difflib
import os
from typing import Any

import msgspec

from .errors import ConfigError
from .worker.addresses import is_loopback, is_utf8, tcp_host
from .worker.model_config import DTYPES as CHECKPOINT_DTYPES
from .worker.model_config import ModelConfig, check_division

EXECUTORS = ("mp", "uni", "external", "ray")
DTYPES = ("auto", *CHECKPOINT_DTYPES)
LOAD_FORMATS = ("auto", "dummy")
DEVICES = ("auto", "cpu", "cuda")
POLICIES = ("fcfs", "priority")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_LONGEST_TIMEOUT = 1e9
_MOST = {"max_num_seqs": 1 << 16, "max_num_batched_tokens": 1 << 20}
_TOKEN_BYTES = 4

HELP = {
    "tokenizer": "folder or hub id of the tokenizer, when it is not the model's",
    "skip_tokenizer_init": "prompts are token ids, and no text comes out",
    "revision": "of a hub id: branch, tag or commit",
    "dtype": "of weights and KV; auto takes the checkpoint's",
    "load_format": "dummy fills random weights: no checkpoint is read",
    "device": "auto takes a GPU where there is one",
    "seed": "of the seeds given to requests that bring none",
    "max_model_len": "longest prompt plus output, in tokens; by itself what model and KV pool allow",
    "max_num_seqs": "requests in one step at most",
    "max_num_batched_tokens": "tokens in one step at most; longer prompts are computed in chunks",
    "max_logprobs": "most log-probabilities a request may ask for at each token",
    "block_size": "tokens in a KV block",
    "gpu_memory_utilization": "share of a GPU's memory for weights and KV",
    "kv_cache_memory_bytes": "size of the KV pool; on a CPU by itself 1/4 of the free memory, 4 GiB at most",
    "num_kv_blocks": "size of the KV pool in blocks instead",
    "enable_prefix_caching": "requests with the same beginning share its KV",
    "scheduling_policy": "fcfs, or priority: a lower number first, then by arrival",
    "async_scheduling": "plan a step before the previous one has returned; by itself on where it can be",
    "executor": "mp: a worker process per device; uni: the worker inside the engine core; external: workers that "
    "others start, with python -m stepahead.worker; ray: workers that Ray starts; or package.module:Class",
    "executor_address": "where external workers connect: tcp://HOST:PORT (* for every network, port 0 for a free one), "
    "or ipc://FILE in a folder of yours alone",
    "key_file": "of external workers' links, made by stepahead keygen; needed beyond this machine",
    "join_timeout": "seconds in which all workers must have come",
    "worker_timeout": "seconds of silence after which an external worker counts as gone, and the engine to it",
    "tensor_parallel_size": "ranks that share each layer",
    "pipeline_parallel_size": "stages that share the layers",
    "step_timeout": "seconds a step may take before its workers count as hung",
    "log_level": "debug, info, warning, error or critical; to stderr",
}
"""What each setting of EngineConfig means to a user."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings a user may give, by vLLM's names where vLLM has one. HELP says what each means.

    model: a local folder in Hugging Face's layout (the front end has resolved hub ids by now).
    """

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_logprobs: int = 20
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_kv_blocks: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    async_scheduling: bool | None = None
    executor: str = "mp"
    executor_address: str = "tcp://127.0.0.1:0"
    key_file: str | None = None
    join_timeout: float = 600.0
    worker_timeout: float = 10.0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    step_timeout: float = 300.0
    log_level: str = "warning"

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The rank whose tokens count: tensor rank 0 of the last pipeline stage."""
        return self.world_size - self.tensor_parallel_size


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What travels to the engine core and the workers: nothing in it is "auto" except the device,
    which only a worker can see.

    max_model_len: an upper bound until the KV pool's size is known.
    max_model_len_asked: whether the user set it, so that a pool too small is an error, not a clamp.
    """

    settings: EngineConfig
    model: ModelConfig
    dtype: str
    max_model_len: int
    max_model_len_asked: bool
    async_scheduling: bool
    async_reason: str

    @property
    def max_in_flight(self) -> int:
        """Depth of the batch queue: steps started and not yet processed."""
        return self.settings.pipeline_parallel_size + (1 if self.async_scheduling else 0)


def parse_settings(model: str, settings: dict[str, Any]) -> EngineConfig:
    """Checks names, types and ranges. Raises: ConfigError naming the setting, its value and the limit."""
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"model={model!r}: must be a local folder or a hub id")
    known = EngineConfig.__struct_fields__
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"unknown setting {name!r}{hint}")
    if isinstance(settings.get("executor"), type):
        settings = {**settings, "executor": _import_path(settings["executor"])}
    try:
        config = msgspec.convert({"model": str(model), **settings}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad setting: {error}") from None
    _check_texts(config)
    _check_ranges(config)
    _check_links(config)
    return config


def _import_path(executor: type) -> str:
    """Of a class of the user's, which another process imports."""
    if executor.__module__ == "__main__" or "<locals>" in executor.__qualname__:
        raise ConfigError(f"executor={executor!r}: the engine's process must import it: put it at the top of a module")
    return f"{executor.__module__}:{executor.__qualname__}"


def resolve(config: EngineConfig, model: ModelConfig, executor_supports_async: bool) -> ResolvedConfig:
    """Raises: ConfigError."""
    asked = config.max_model_len
    if asked is not None and asked > model.max_position:
        raise ConfigError(f"max_model_len={asked} is longer than the model's {model.max_position} positions")
    check_division(model, config.tensor_parallel_size, config.pipeline_parallel_size)
    _check_batch_memory(config.max_num_seqs, asked or model.max_position)
    async_on, reason = resolve_async_scheduling(config, executor_supports_async)
    return ResolvedConfig(
        settings=config,
        model=model,
        dtype=model.dtype if config.dtype == "auto" else config.dtype,
        max_model_len=asked or model.max_position,
        max_model_len_asked=asked is not None,
        async_scheduling=async_on,
        async_reason=reason,
    )


def resolve_async_scheduling(config: EngineConfig, executor_supports: bool) -> tuple[bool, str]:
    """Whether a step is scheduled before the previous one has returned, and why.

    Raises: ConfigError when it is asked for and cannot be had.
    """
    if config.async_scheduling is False:
        return False, "asked off"
    if not executor_supports:
        reason = f"executor {config.executor!r} does not say that it supports async scheduling"
        if config.async_scheduling:
            raise ConfigError(f"async_scheduling=True: {reason}")
        return False, reason
    asked = "asked on" if config.async_scheduling else "default"
    return True, f"{asked}; executor {config.executor!r} supports it"


def _check_links(config: EngineConfig) -> None:
    """Nothing is bound where strangers could connect."""
    address = config.executor_address
    host = tcp_host(address, "executor_address")
    has_key = config.key_file is not None or config.executor == "ray"  # which makes one for itself
    if host is not None and not is_loopback(host) and not has_key:
        raise ConfigError(
            f"executor_address={address!r} can be reached from other machines and needs a key_file: "
            "`stepahead keygen FILE` makes one"
        )
    if config.key_file is not None:
        from .worker.link_key import read_key_file

        read_key_file(config.key_file)


def _check_batch_memory(max_num_seqs: int, max_model_len: int) -> None:
    """Every request in a step has room for max_model_len token ids."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = memory // (max_model_len * _TOKEN_BYTES)
    if max_num_seqs > most:
        raise ConfigError(
            f"max_num_seqs={max_num_seqs}: token ids of that many requests of max_model_len={max_model_len} fill more "
            f"than this machine's {memory >> 30} GiB of memory; must be at most {most}"
        )


def _check_texts(config: EngineConfig) -> None:
    """Texts travel to other processes as UTF-8. Raises: ConfigError for one that cannot."""
    for name in EngineConfig.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, str) and not is_utf8(value):
            raise ConfigError(f"{name}={value!r}: must be UTF-8")


def _check_ranges(config: EngineConfig) -> None:
    for name in EngineConfig.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{name}={value}: must be a 64-bit number")
    if config.max_model_len == 1:
        raise ConfigError("max_model_len=1: must be at least 2, a token of a prompt and one to generate")
    at_least_one = (
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes",
        "num_kv_blocks", "tensor_parallel_size", "pipeline_parallel_size",
    )  # fmt: skip
    for name in at_least_one:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    for name, most in _MOST.items():
        value = getattr(config, name)
        if value > most:
            raise ConfigError(f"{name}={value}: must be at most {most}")
    for name, allowed in (
        ("executor", EXECUTORS), ("dtype", DTYPES), ("load_format", LOAD_FORMATS),
        ("device", DEVICES), ("scheduling_policy", POLICIES),
        ("log_level", LOG_LEVELS),
    ):  # fmt: skip
        value = getattr(config, name)
        if value not in allowed and not (name == "executor" and ":" in value):
            raise ConfigError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization={config.gpu_memory_utilization}: must be above 0 and at most 1")
    if config.block_size & (config.block_size - 1) or config.block_size > 256:
        raise ConfigError(f"block_size={config.block_size}: must be a power of two, 256 at most")
    if config.max_logprobs < 0:
        raise ConfigError(f"max_logprobs={config.max_logprobs}: must not be negative")
    for name in ("join_timeout", "step_timeout"):
        value = getattr(config, name)
        if not 0 < value <= _LONGEST_TIMEOUT:
            raise ConfigError(f"{name}={value}: must be above 0 and at most {_LONGEST_TIMEOUT:g}")
    if not 1 <= config.worker_timeout <= _LONGEST_TIMEOUT:
        raise ConfigError(f"worker_timeout={config.worker_timeout}: must be 1 to {_LONGEST_TIMEOUT:g}")
    if config.world_size > 1 and config.executor == "uni":
        raise ConfigError(f"executor 'uni' runs one rank, not {config.world_size}: use 'mp'")
