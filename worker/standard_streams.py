"""Standard output and standard error for a process that was started without them."""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """Gives a closed one /dev/null, before a socket takes its number and gets what is meant for it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w")  # noqa: SIM115 (for good; the lowest free number is its own)
            setattr(sys, name, stream)
