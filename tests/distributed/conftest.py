"""Tests whose processes are the ranks that torchrun started."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

WITHOUT_TORCHRUN = "needs ranks: torchrun --nproc-per-node 2 -m pytest -q tests/distributed"


class Ranks:
    """This process among its like, who all run the same tests in the same order. No torch.distributed group is
    needed: what they tell each other goes through torchrun's own store. folder: one for all, this user's alone."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self._store = dist.PrefixStore("tests", store)
        self._turn = 0
        self.folder = Path(self.share(tempfile.mkdtemp(prefix="t-", dir="/tmp") if self.rank == 0 else None))

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        self._turn += 1
        if self.rank == 0:
            self._store.set(f"value-{self._turn}", json.dumps(value))
        return json.loads(self._store.get(f"value-{self._turn}"))

    def meet(self) -> None:
        self._turn += 1
        if self._store.add(f"come-{self._turn}", 1) == self.size:
            self._store.set(f"all-{self._turn}", "")
        self._store.get(f"all-{self._turn}")

    def group_store(self) -> dist.Store:
        self._turn += 1
        return dist.PrefixStore(f"group-{self._turn}", self._store)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        pytest.skip(WITHOUT_TORCHRUN)
    all_ranks = Ranks()
    yield all_ranks
    all_ranks.meet()
    if all_ranks.rank == 0:
        shutil.rmtree(all_ranks.folder)


@pytest.fixture
def gloo(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.distributed's default group over all ranks."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=ranks.group_store(), rank=ranks.rank, world_size=ranks.size)
    yield
    ranks.meet()
    dist.destroy_process_group()
