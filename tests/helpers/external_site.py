"""An executor whose workers are started by the test, as processes of their own, and who else knocks at its links."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from external_workers import start_worker
from paper_device import paper_config
from paper_worker import PaperExternal
from plans import plan
from process_tools import DEADLINE
from stepahead.executor.external import ExternalExecutor
from stepahead.worker.handshake import PROTOCOL, Hello
from stepahead.worker.messages import Failure

LOOPBACK = "tcp://127.0.0.1:0"


class Site:
    """An executor that is being made, its workers, and strangers."""

    def __init__(self, kind: type[PaperExternal] = PaperExternal) -> None:
        self._kind = kind
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.processes: list[subprocess.Popen[str]] = []
        self.links: list[zmq.Socket[bytes]] = []
        self.address = ""
        self._pool = ThreadPoolExecutor(1)
        self._executor: Future[ExternalExecutor] | None = None

    def open(self, address: str = LOOPBACK, step_ms: float = 0.0, **settings: Any) -> str:
        """Returns where to connect."""
        config = paper_config(executor="paper_worker:PaperExternal", executor_address=address, **settings)
        model = msgspec.structs.replace(config.model, step_ms=step_ms)
        self._executor = self._pool.submit(self._kind, msgspec.structs.replace(config, model=model))
        self.address = PaperExternal.addresses.get(timeout=DEADLINE)
        return self.address

    def worker(
        self, rank: int, key_file: Path | None = None, address: str = "", launch: str = "", **environment: str
    ) -> subprocess.Popen[str]:
        """address: where else it is to connect."""
        place = ["--rank", str(rank), *(["--launch", launch] if launch else [])]
        process = start_worker(address or self.address, *place, key_file=key_file, **environment)
        self.processes.append(process)
        return process

    def executor(self) -> ExternalExecutor:
        assert self._executor is not None
        executor = self._executor.result(DEADLINE)
        executor.initialize_cache(executor.worker_infos()[0].kv_blocks, executor.config.max_model_len)
        return executor

    def stranger(self, kind: int = zmq.DEALER, address: str = "") -> zmq.Socket[bytes]:
        link = self.context.socket(kind)
        self.links.append(link)  # one that is forgotten would wait for ever to be heard
        link.connect(address or self.address)
        return link

    def _fail(self) -> None:
        """An executor that waits for workers ends when one of them has failed."""
        for rank in range(2):
            link = self.stranger()
            link.send(hello(rank=rank, machine="elsewhere", rendezvous="nowhere"))
            if link.poll(2000):
                _, *start = msgspec.msgpack.decode(link.recv())
                if len(start) > 1:
                    failure = Failure(rank=rank, message="the test is over", traceback="")
                    self.stranger(zmq.PUSH, start[3]).send(msgspec.msgpack.encode(failure))

    def close(self) -> None:
        if self._executor is not None:
            if not self._executor.done():
                self._fail()
            error = self._executor.exception(DEADLINE)
            if error is None:
                self._executor.result().shutdown()
        for process in self.processes:
            process.communicate(timeout=DEADLINE)
        self.context.destroy(linger=0)
        self._pool.shutdown()


def hello(**fields: Any) -> bytes:
    known = {"protocol": PROTOCOL, "rank": 0, "local_rank": 0, "local_size": 1, "host": "h", "pid": 1, "machine": "m"}
    return msgspec.msgpack.encode(Hello(**{**known, **fields}))


def lines(caplog: pytest.LogCaptureFixture, pattern: str) -> list[str]:
    return [message for message in caplog.messages if re.search(pattern, message)]


def step(executor: ExternalExecutor, step_id: int) -> int:
    executor.execute_model(plan(step_id)).result()
    return int(executor.sample_tokens(None).result().sampled[0, 0])
