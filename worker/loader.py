"""Weights from a model folder's safetensors files into a model, one tensor at a time."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from ..errors import ConfigError
from .models.base import Model
from .models.registry import model_class
from .parallel import ONLY_STAGE, ParallelGroup, PipelineStage
from .weights import WeightSource

if TYPE_CHECKING:
    from ..config import ResolvedConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_model(
    config: ResolvedConfig, device: torch.device, group: ParallelGroup, stage: PipelineStage = ONLY_STAGE
) -> Model:
    """The model with its weights on `device`, this rank's part of them.

    Raises: ConfigError naming the file or weight that is missing, damaged, unexpected or misshapen.
    """
    dtype = DTYPES[config.dtype]
    # No request is longer than max_model_len: position tables need not be either.
    model_config = msgspec.structs.replace(config.model, max_position=config.max_model_len)
    model: Model = model_class(config.model.architecture)(model_config, dtype, device, group, stage)
    if config.settings.load_format == "dummy":
        model.load_weights(dummy_weights(model.weight_shapes(), dtype, device, config.settings.seed))
    else:
        model.load_weights(checkpoint_weights(Path(config.settings.model)))
    return model


def checkpoint_weights(folder: Path) -> Iterator[tuple[str, WeightSource]]:
    """Every tensor of the folder's safetensors, unread until indexed. The files stay memory-mapped in turn.

    Raises: ConfigError, when iteration comes to it.
    """
    for path in weight_files(folder):
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read weights {path}: truncated or not safetensors ({error})") from None
        with file:
            for name in file.keys():  # noqa: SIM118 (a safetensors file is not a mapping)
                yield name, _FileWeight(path, file.get_slice(name))


def weight_files(folder: Path) -> list[Path]:
    """The folder's one safetensors file, or the shards its index names. Raises: ConfigError."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.is_file():
        raise ConfigError(f"no weights in '{folder}': it has neither {_SINGLE} nor {_INDEX}")
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read {index}: {type(error).__name__}: {error}") from None
    for shard in shards:
        if not (folder / str(shard)).is_file():
            raise ConfigError(f"weights file '{folder / str(shard)}' is missing; {_INDEX} names it")
    return [folder / shard for shard in shards]


def dummy_weights(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights, the same in every process for a name, shape, seed and kind of device.

    Matrices are scaled so that activations keep their size; norms are one, biases zero.
    """
    for name, shape in shapes.items():
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            yield name, torch.full(shape, fill, dtype=dtype, device=device)
            continue
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) ^ seed)
        bound = (3.0 / shape[-1]) ** 0.5
        yield name, torch.empty(shape, dtype=dtype, device=device).uniform_(-bound, bound, generator=generator)


class _FileWeight:
    """A WeightSource in a safetensors file."""

    def __init__(self, path: Path, tensor: Any) -> None:
        self.path = path
        self.tensor = tensor

    @property
    def shape(self) -> list[int]:
        return self.tensor.get_shape()

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        try:
            return self.tensor[part]
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read weights {self.path}: {error}") from None
