"""Logging of the processes that we start: one line an event, on standard error, with the process' name."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager


def log_to_stderr(process_name: str, level: str) -> None:
    """level: of our own messages; the libraries' are shown from warnings up (numba's for debugging are a flood)."""
    logging.basicConfig(format=f"%(asctime)s %(levelname)s [{process_name} pid %(process)d] %(name)s: %(message)s")
    logging.getLogger(__name__.partition(".")[0]).setLevel(level.upper())


@contextmanager
def phase(logger: logging.Logger, what: str) -> Iterator[None]:
    """A part of the start-up, timed: `--log-level debug` shows where the time goes."""
    began = time.perf_counter()
    yield
    logger.debug("start-up: %s took %.2f s", what, time.perf_counter() - began)
