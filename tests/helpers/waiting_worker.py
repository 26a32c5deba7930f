"""The real worker around a HashLM that reads a device value on the host in its forward: what nobody should do."""

from __future__ import annotations

from typing import Any

import torch

from stepahead.config import ResolvedConfig
from stepahead.executor.multiproc import MultiprocExecutor
from stepahead.executor.uniproc import UniProcExecutor
from stepahead.worker.models.hash_lm import HashLM
from stepahead.worker.worker import Worker


class WaitingLM(HashLM):
    def forward(self, *arguments: Any) -> torch.Tensor:
        hidden = super().forward(*arguments)
        assert hidden[-1, 0].item() != 1  # planted
        return hidden


class WaitingWorker(Worker):
    def initialize_cache(self, num_blocks: int, max_model_len: int) -> None:
        super().initialize_cache(num_blocks, max_model_len)
        self._model.__class__ = WaitingLM  # after the start's own steps, which are watched too


class Multiproc(MultiprocExecutor):
    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config, "waiting_worker:WaitingWorker")


class Uniproc(UniProcExecutor):
    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config, "waiting_worker:WaitingWorker")
