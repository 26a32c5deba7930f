"""Logging of the processes that we start: one line an event, on standard error, with the process' name."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SILENCE_S = 10.0


def log_to_stderr(process_name: str, level: str) -> None:
    """level: of our own messages; the libraries' are shown from warnings up (numba's for debugging are a flood)."""
    logging.basicConfig(format=f"%(asctime)s %(levelname)s [{process_name} pid %(process)d] %(name)s: %(message)s")
    logging.getLogger(__name__.partition(".")[0]).setLevel(level.upper())


class Complaints:
    """Warnings about strangers, who may come back many times a second: one line each ten seconds of a kind."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._last: dict[str, float] = {}

    def log(self, text: str, kind: str | None = None) -> None:
        """kind: one of a few, needed where the text has words of the stranger's own in it; else the text is it."""
        kind = text if kind is None else kind
        now = time.monotonic()
        if now - self._last.get(kind, -math.inf) > _SILENCE_S:
            self._last[kind] = now
            self._logger.warning("%s", text)


@contextmanager
def phase(logger: logging.Logger, what: str) -> Iterator[None]:
    """A part of the start-up, timed: `--log-level debug` shows where the time goes."""
    began = time.perf_counter()
    yield
    logger.debug("start-up: %s took %.2f s", what, time.perf_counter() - began)
