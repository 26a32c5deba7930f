"""Where each checkpoint tensor goes, and filling those places completely or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import ConfigError


class WeightSource(Protocol):
    """A checkpoint tensor: in memory (a torch.Tensor is one), or in a file, read when indexed."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor: ...


@dataclass(frozen=True)
class WeightSlot:
    """target: (a view of) the parameter that this rank fills.
    shape: of the whole tensor in the checkpoint. part: the slices of it that this rank keeps.
    """

    target: torch.Tensor
    shape: tuple[int, ...]
    part: tuple[slice, ...]

    @classmethod
    def whole(cls, target: torch.Tensor) -> WeightSlot:
        """For a tensor that every rank keeps whole."""
        return cls(target, tuple(target.shape), (slice(None),) * target.dim())

    def fill(self, name: str, source: WeightSource) -> None:
        """Reads only this rank's part; casts it on the way. Raises: ConfigError."""
        if tuple(source.shape) != self.shape:
            raise ConfigError(
                f"weight {name!r} has shape {list(source.shape)}, but config.json makes it {list(self.shape)}"
            )
        value = source[self.part]
        if not value.is_floating_point():
            raise ConfigError(f"weight {name!r} has dtype {value.dtype}, but must be a floating-point tensor")
        self.target.copy_(value)


def fill_slots(slots: Mapping[str, WeightSlot], weights: Iterable[tuple[str, WeightSource]]) -> None:
    """Fills every slot once. Raises: ConfigError naming a missing, unexpected, doubled or misshapen weight."""
    missing = set(slots)
    for name, source in weights:
        if name not in slots:
            raise ConfigError(f"unexpected weight {name!r}: config.json describes a model without it")
        if name not in missing:
            raise ConfigError(f"weight {name!r} is in the checkpoint twice")
        slots[name].fill(name, source)
        missing.remove(name)
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ConfigError(f"weight {min(missing)!r} is missing from the checkpoint{more}")
