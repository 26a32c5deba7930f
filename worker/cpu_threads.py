"""Which threads compute on a CPU: the device thread and its OpenMP helpers, and nobody else."""

from __future__ import annotations

import os
from functools import partial

import torch

from .device import Device

_DEFAULT = torch.get_num_threads()


def share_cores(device: Device, ranks_here: int) -> None:
    """The device thread gets this rank's share of the cores, every other thread computes alone. Waits.

    GNU's OpenMP gives each thread that divides its work helpers of its own, and when there are more of all these than
    cores, those of the device thread no longer spin between two of a step's hundred and more parallel regions: they
    sleep, and to wake them takes as long as the region. One large copy by another thread slows every later step so.
    ranks_here: on this machine. OMP_NUM_THREADS, when set, is what each rank gets.
    """
    threads = _DEFAULT if "OMP_NUM_THREADS" in os.environ else max(1, _DEFAULT // ranks_here)
    device.run(partial(_compute_with, threads))
    # A thread starts from what was set last, by whichever thread.
    torch.set_num_threads(1)


def _compute_with(threads: int) -> None:
    torch.get_num_threads()  # a thread's first look at its number resets it
    torch.set_num_threads(threads)
