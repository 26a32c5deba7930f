"""Only the device thread divides its work among threads. In a process of its own: the setting is the process's."""

import os
import subprocess
import sys

import pytest

CODE = """
import threading, torch
from stepahead.worker.cpu_threads import share_cores
from stepahead.worker.device_cpu import CpuDevice
default = torch.get_num_threads()
device = CpuDevice()
share_cores(device, {ranks_here})
later = []
thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
thread.start()
thread.join()
device.run(lambda: torch.ones(1 << 20).sum())
print(device.run(torch.get_num_threads), torch.get_num_threads(), *later, default)
device.close()
"""


@pytest.mark.parametrize(("omp", "ranks_here"), [("2", 1), ("2", 2), (None, 1), (None, 10_000)])
def test_the_device_thread_has_the_cores_and_every_other_thread_one(omp, ranks_here):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if omp is not None:
        environment["OMP_NUM_THREADS"] = omp
    code = CODE.format(ranks_here=ranks_here)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    *counts, default = done.stdout.split()
    assert counts == ["1" if ranks_here == 10_000 else default, "1", "1"], done.stderr
