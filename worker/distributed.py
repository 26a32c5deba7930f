"""Joins the ranks of one model: torch.distributed groups for the tensor-parallel ranks and the links of a pipeline."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..config import ResolvedConfig
from ..errors import PeerLostError
from .messages import Rendezvous
from .parallel import Link, ParallelGroup, PipelineStage, Ranks

JOIN_TIMEOUT = 300.0
"""Seconds that the other ranks may take to come, and a collective may take at least."""

_LOOPBACK_NAMES = ("lo", "lo0")


def join_ranks(config: ResolvedConfig, rank: int, device: torch.device, rendezvous: Rendezvous | None) -> Ranks:
    """What this rank is part of. Waits for every rank; with one rank there is nothing to join.

    Raises: PeerLostError when another rank dies meanwhile.
    """
    settings = config.settings
    if settings.world_size == 1:
        return Ranks()
    assert rendezvous is not None, "a rank among several must be told where the others are"
    if rendezvous.address.startswith("file://"):
        _stay_on_this_machine()
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=rendezvous.address,
            rank=rank,
            world_size=settings.world_size,
            timeout=datetime.timedelta(seconds=max(JOIN_TIMEOUT, min(settings.step_timeout, 1e6))),
            device_id=device if device.type == "cuda" else None,
        )
        return _make_groups(rank, settings.tensor_parallel_size, settings.pipeline_parallel_size, device)
    except RuntimeError as error:
        if isinstance(error, PeerLostError):
            raise
        raise PeerLostError(f"rank {rank} could not join the others: {error}") from error


def leave_ranks() -> None:
    """Safe when no group was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _make_groups(rank: int, tensor_size: int, num_stages: int, device: torch.device) -> Ranks:
    """Every rank makes all groups, its own or not, in one order: that is what torch.distributed asks for."""
    index, place = divmod(rank, tensor_size)
    tensor_group: Any = None  # the default group
    if num_stages > 1:
        for number in range(num_stages):
            made = dist.new_group(range(number * tensor_size, (number + 1) * tensor_size))
            tensor_group = made if number == index else tensor_group
    before = after = tokens = None
    for first in range(tensor_size if num_stages > 1 else 0):
        column = range(first, tensor_size * num_stages, tensor_size)
        for nth in range(1, num_stages):
            link = _make_link(rank, column[nth - 1 : nth + 1], device)
            if rank == column[nth - 1]:
                after = link
            elif rank == column[nth]:
                before = link
        tokens = _make_link(rank, (column[-1], column[0]), device) or tokens
    stage = PipelineStage(index, num_stages, before, after, tokens)
    return Ranks(ParallelGroup(place, tensor_size, tensor_group), stage)


def _make_link(rank: int, ends: Sequence[int], device: torch.device) -> Link | None:
    """None for ranks at neither end. ends: (from, to). Something is sent at once, so that both ends are
    connected when this returns; links are made one after another everywhere, so nobody waits in a circle."""
    group = dist.new_group(list(ends))
    if rank not in ends:
        return None
    link = Link(ends[1] if rank == ends[0] else ends[0], group)
    greeting = torch.zeros(1, dtype=torch.int32, device=device)
    (link.send(greeting) if rank == ends[0] else link.receive(greeting)).finish()
    return link


def _stay_on_this_machine() -> None:
    """A rendezvous in a file is for one machine: nothing need listen where others could connect."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in _LOOPBACK_NAMES if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
