"""Joins the ranks of one model into torch.distributed groups."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from ..config import ResolvedConfig
from .parallel import ParallelGroup

JOIN_TIMEOUT = 300.0
"""Seconds that the other ranks may take to come, and a collective may take."""


def join_ranks(config: ResolvedConfig, rank: int, device: torch.device, rendezvous: str) -> ParallelGroup:
    """This rank's tensor-parallel group. Waits for every rank; with one rank there is nothing to join.

    rendezvous: where the ranks find each other, as torch.distributed's init_method, e.g. "file:///dir/file".
    """
    size = config.settings.tensor_parallel_size
    if size == 1:
        return ParallelGroup()
    if device.type == "cpu":
        # Ranks of one machine share its cores: as many threads each as there are cores would fight.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=config.settings.world_size,
        timeout=datetime.timedelta(seconds=JOIN_TIMEOUT),
        device_id=device if device.type == "cuda" else None,
    )
    return ParallelGroup(rank=rank, size=size)


def leave_ranks() -> None:
    """Safe when no group was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
