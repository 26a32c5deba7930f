"""Logging of the processes that we start: one line an event, on standard error, with the process' name."""

from __future__ import annotations

import logging


def log_to_stderr(process_name: str, level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s %(levelname)s [{process_name} pid %(process)d] %(name)s: %(message)s"
    )
