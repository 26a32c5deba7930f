"""A port for what must be told one beforehand."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(15_000, 30_000)
"""No connection gets one of these by itself, so that one that is free now is free when it is bound."""


def port_below_the_ephemeral() -> int:
    for port in random.SystemRandom().sample(_BELOW_EPHEMERAL, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("a hundred ports in use")
