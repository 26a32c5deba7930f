"""The ranks that compute one model together: tensor-parallel groups, and the stages of a pipeline.

Global rank = stage * tensor_parallel_size + rank within the group. With one rank every operation is a no-op. All of
it is launched work: on CUDA it is queued on the compute stream, on CPU the device thread waits in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError, PeerLostError

# Its name from torch 2.13 on.
_gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor


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
            try:
                torch.distributed.all_reduce(tensor, group=self.process_group)
            except RuntimeError as error:
                raise _lost("all_reduce", error) from error
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Every rank's tensor (all of one shape), concatenated along `dim` in the order of ranks."""
        if self.size == 1:
            return tensor
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        try:
            _gather(gathered, tensor.contiguous(), group=self.process_group)
        except RuntimeError as error:
            raise _lost("all_gather", error) from error
        return torch.cat(gathered.chunk(self.size), dim)

    def share(self, total: int, what: str) -> int:
        """How many of `total` each rank gets. Raises: ConfigError naming both when they do not divide."""
        if total % self.size:
            raise ConfigError(f"{total} {what} cannot be divided among tensor_parallel_size={self.size} ranks")
        return total // self.size


@dataclass(frozen=True)
class Link:
    """One direction between two ranks, with a process group of its own: what goes on one link never waits for what
    goes on another. peer: the other end's global rank."""

    peer: int
    process_group: Any

    def send(self, tensor: torch.Tensor) -> Transfer:
        """Starts it. The tensor must not change until the transfer has ended."""
        return self._start("send", torch.distributed.isend, tensor)

    def receive(self, tensor: torch.Tensor) -> Transfer:
        """Starts it, into `tensor`."""
        return self._start("receive", torch.distributed.irecv, tensor)

    def _start(self, what: str, operation: Callable[..., Any], tensor: torch.Tensor) -> Transfer:
        try:
            return Transfer(what, tensor, operation(tensor, self.peer, group=self.process_group))
        except RuntimeError as error:
            raise _lost(what, error) from error


@dataclass(frozen=True)
class Transfer:
    """A tensor on its way between two ranks."""

    what: str
    tensor: torch.Tensor
    work: Any

    def finish(self) -> torch.Tensor:
        """What is launched next comes after it. Returns the tensor."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _lost(self.what, error) from error
        return self.tensor


@dataclass(frozen=True)
class PipelineStage:
    """A rank's stage, 0 .. size - 1: which of the model's layers it holds, and its links to other stages.

    before, after: hidden states from the stage before and to the stage after. tokens: sampled tokens, which go
    from the last stage to the first. None where there is none.
    """

    index: int = 0
    size: int = 1
    before: Link | None = None
    after: Link | None = None
    tokens: Link | None = None

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.size - 1

    def layers(self, total: int) -> range:
        """This stage's share of a model's layers. The last one has the LM head too, so it gets no more than others."""
        return range(-(-self.index * total // self.size), -(-(self.index + 1) * total // self.size))


ONLY_STAGE = PipelineStage()


@dataclass(frozen=True)
class Ranks:
    """What a rank is part of."""

    group: ParallelGroup = ParallelGroup()
    stage: PipelineStage = ONLY_STAGE


def _lost(what: str, error: RuntimeError) -> PeerLostError:
    """An operation that other ranks take part in fails when one of them has."""
    return PeerLostError(f"{what} with other ranks failed: {str(error).splitlines()[0]}")
