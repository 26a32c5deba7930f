"""Joins the ranks of one model: torch.distributed groups for the tensor-parallel ranks and the links of a pipeline."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ..config import ResolvedConfig
from ..errors import PeerLostError
from .addresses import split_tcp
from .handshake import own_address
from .messages import Rendezvous
from .parallel import Link, ParallelGroup, PipelineStage, Ranks

MEETING_TIMEOUT = 300.0
"""Seconds that the other ranks may take to come, and a collective may take at least."""


def join_ranks(config: ResolvedConfig, rank: int, device: torch.device, rendezvous: Rendezvous | None) -> Ranks:
    """What this rank is part of. Waits for every rank; with one rank there is nothing to join.

    Raises: PeerLostError when another rank dies meanwhile.
    """
    settings = config.settings
    if settings.world_size == 1:
        return Ranks()
    assert rendezvous is not None, "a rank among several must be told where the others are"
    timeout = datetime.timedelta(seconds=max(MEETING_TIMEOUT, min(settings.step_timeout, 1e6)))
    try:
        if rendezvous.address.startswith("file://"):
            _use_interface_of("127.0.0.1")
            store = dist.FileStore(rendezvous.address.removeprefix("file://"), settings.world_size)
        else:
            _use_interface_of(own_address(rendezvous.address))
            store = _meet(rendezvous, settings.world_size, timeout)
        store.set_timeout(timeout)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=settings.world_size,
            timeout=timeout,
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


def _meet(rendezvous: Rendezvous, world_size: int, timeout: datetime.timedelta) -> Any:
    """The store through which ranks of several machines tell each other their addresses."""
    host, port = split_tcp(rendezvous.address)
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=rendezvous.listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=rendezvous.listener,
    )


def _use_interface_of(address: str) -> None:
    """Ranks listen for each other where this machine has `address`, and nowhere else: a rendezvous in a file or on
    loopback is for one machine, others need the network that leads to the engine. What the user chose stays."""
    names = [
        name for name, entries in psutil.net_if_addrs().items() if any(entry.address == address for entry in entries)
    ]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
        if not ip_address(address).is_loopback:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", names[0])
