"""The ranks that compute one model together. With one rank every operation is a no-op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError


@dataclass(frozen=True)
class ParallelGroup:
    """rank: this process's place, 0 .. size - 1.
    process_group: the torch.distributed group behind it (None is the default group); unused when size is 1.
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks. Changes `tensor` in place and returns it."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor, group=self.process_group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Every rank's tensor (all of one shape), concatenated along `dim` in the order of ranks."""
        if self.size == 1:
            return tensor
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        torch.distributed.all_gather_into_tensor(gathered, tensor.contiguous(), group=self.process_group)
        return torch.cat(gathered.chunk(self.size), dim)

    def share(self, total: int, what: str) -> int:
        """How many of `total` each rank gets. Raises: ConfigError naming both when they do not divide."""
        if total % self.size:
            raise ConfigError(f"{total} {what} cannot be divided among tensor_parallel_size={self.size} ranks")
        return total // self.size
