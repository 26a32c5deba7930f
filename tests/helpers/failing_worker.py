"""The real worker on ranks of which one fails: where and how is said by the environment, once for each engine."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import stepahead.worker.worker
from stepahead.config import ResolvedConfig
from stepahead.executor.external import ExternalExecutor
from stepahead.executor.multiproc import MultiprocExecutor
from stepahead.worker.messages import Rendezvous, StepPlan
from stepahead.worker.worker import Worker

VARIABLE = "FAILING_WORKER"
"""rank:where, where being one of the words below."""


def _boom(*_: Any) -> None:
    raise ZeroDivisionError("planted on the device")


class FailingWorker(Worker):
    """killed-joining, killed-loaded: a SIGKILL at start-up. raises-loading: once it has joined the others. exits-N,
    raises, raises-on-device: in step 1. stuck-N: its device stands still from step N on, and the other ranks wait."""

    def __init__(self, config: ResolvedConfig, rank: int = 0, rendezvous: Rendezvous | None = None) -> None:
        failing, _, self._where = os.environ[VARIABLE].partition(":")
        self._fails = rank == int(failing)
        if self._fails and self._where == "killed-joining":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fails and self._where == "raises-loading":
            stepahead.worker.worker.load_model = _boom
        super().__init__(config, rank, rendezvous)

    def info(self) -> Any:
        if self._fails and self._where == "killed-loaded":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().info()

    def execute_model(self, plan: StepPlan) -> None:
        if self._fails and plan.step_id == 1 and self._where == "raises":
            raise ZeroDivisionError("planted")
        if self._fails and plan.step_id == 1 and self._where == "raises-on-device":
            self._device.launch(_boom)
        if self._fails and plan.step_id == 1 and self._where.startswith("exits-"):
            os._exit(int(self._where.removeprefix("exits-")))
        if self._fails and self._where == f"stuck-{plan.step_id}":
            self._device.launch(lambda: time.sleep(60))
        super().execute_model(plan)


class FailingMultiproc(MultiprocExecutor):
    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config, "failing_worker:FailingWorker")


class FailingExternal(ExternalExecutor):
    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config, "failing_worker:FailingWorker")
