"""What scripts/launch.py is to start on this machine, worked out and checked before anything is started."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LaunchPlan:
    """engine: the command line of `stepahead`, None on nodes other than 0. address: where workers connect, None for a
    socket in the private folder. first_rank, local_size: this machine's ranks."""

    engine: list[str] | None
    address: str | None
    key_file: str | None
    first_rank: int
    local_size: int


def make_plan(arguments: argparse.Namespace, command: list[str]) -> LaunchPlan:
    """Raises: ConfigError when the model, the machine and the wishes do not go together; InvalidRequestError and
    SystemExit when the engine would not take its command line."""
    from stepahead.config import check_division, parse_settings
    from stepahead.errors import ConfigError
    from stepahead.frontend import cli
    from stepahead.frontend.hub import resolve_folder
    from stepahead.worker.model_config import read_model_config

    world_size = arguments.tp * arguments.pp
    if min(arguments.tp, arguments.pp, arguments.nnodes) < 1 or not 0 <= arguments.node_rank < arguments.nnodes:
        raise ConfigError("--tp, --pp and --nnodes must be 1 or more, and --node-rank from 0 to below --nnodes")
    if world_size % arguments.nnodes:
        raise ConfigError(f"{world_size} ranks cannot be divided among --nnodes {arguments.nnodes} machines")
    what = "HOST:PORT, node 0 as the others reach it and a free port there"
    if arguments.nnodes > 1 and arguments.head is None:
        raise ConfigError(f"--nnodes above 1 needs --head {what}")
    if arguments.head is not None and not re.fullmatch(r".+:[1-9]\d*", arguments.head):
        raise ConfigError(f"--head={arguments.head!r}: must be {what}")
    if command and arguments.node_rank:
        raise ConfigError(f"{command[0]!r} ...: only node 0 takes what follows `--`")
    if arguments.nnodes > 1 and not arguments.key_file:
        raise ConfigError("--nnodes above 1 needs --key-file, the same on all: `stepahead keygen FILE` makes one")
    model = os.path.abspath(resolve_folder(arguments.model, None))
    check_division(read_model_config(model), arguments.tp, arguments.pp)
    local_size = world_size // arguments.nnodes
    settings: dict[str, Any] = {
        "executor": "external",
        "device": _device(arguments.device, local_size),
        "tensor_parallel_size": arguments.tp,
        "pipeline_parallel_size": arguments.pp,
    }
    address = f"tcp://{arguments.head}" if arguments.head else None
    if address is not None:
        settings["executor_address"] = address if arguments.nnodes == 1 else _everywhere(arguments.head)
    key_file = os.path.abspath(arguments.key_file) if arguments.key_file else None
    if key_file is not None:
        settings["key_file"] = key_file
    parse_settings(model, settings)
    engine = None
    if arguments.node_rank == 0:
        name, rest = (command[0], command[1:]) if command and command[0][:1] != "-" else ("generate", command)
        options = [f"--{setting.replace('_', '-')}={value}" for setting, value in settings.items()]
        engine = [name, "--model", model, *options, *rest]
        _check_same(cli.check(engine), model, settings)
    return LaunchPlan(engine, address, key_file, arguments.node_rank * local_size, local_size)


def _check_same(arguments: argparse.Namespace, model: str, settings: dict[str, Any]) -> None:
    """arguments: the engine's. Raises: ConfigError when what follows `--` says otherwise than the workers are told."""
    from stepahead.config import EXECUTORS
    from stepahead.errors import ConfigError

    told = {"executor_address": None, "key_file": None, **settings, "model": model}
    for name, value in told.items():
        given = getattr(arguments, name, None)
        is_executor_class = name == "executor" and given not in EXECUTORS
        if given != value and not is_executor_class:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {given}: what follows the -- cannot differ from what is before it: {value}")


def _everywhere(head: str) -> str:
    """Where the engine listens: the name by which others reach node 0 may mean something else there, or be no address
    of its own at all."""
    return f"tcp://{'[::]' if head.startswith('[') else '*'}:{head.rpartition(':')[2]}"


def _device(asked: str, local_size: int) -> str:
    """Raises: ConfigError when there are fewer GPUs than this machine's ranks."""
    from stepahead.errors import ConfigError

    if asked == "cpu":
        return asked
    import torch

    gpus = torch.cuda.device_count()
    if gpus < local_size and (gpus or asked == "cuda"):
        raise ConfigError(f"{local_size} ranks on this machine, and {gpus} GPUs: take fewer, or --device cpu")
    return "cuda" if gpus else "cpu"
