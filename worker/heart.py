"""Tells the engine that this worker lives, and notices when the engine does not. Importing this loads no torch.

For workers that are not the engine's children, perhaps on another machine: neither end sees the other one's exit.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

import msgspec
import zmq

from .link_key import LinkKey
from .sockets import connect, open_socket, take

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0

NO_SIGN_OF_ENGINE = "no sign of the engine for %g seconds; leaving"

LONGEST_TURN_S = 2 * INTERVAL_S
"""A loop whose turn took longer has stood still with its process: what came meanwhile may not be here to be read yet,
so it judges nobody that turn, and the excess is no silence of others."""


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """The engine sends it back as it is."""

    rank: int


def start_beating(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key: LinkKey | None, rank: int, timeout: float
) -> None:
    """In a thread, until the context ends. After `timeout` seconds without an echo the process exits."""
    threading.Thread(target=_beat, args=(context, address, key, rank, timeout), name="heartbeat", daemon=True).start()


def _beat(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key: LinkKey | None, rank: int, timeout: float
) -> None:
    link = open_socket(context, zmq.DEALER)
    try:
        if key is not None:
            key.present(link)
        connect(link, address)
        beat = msgspec.msgpack.encode(Beat(rank))
        heard = time.monotonic()
        while True:
            link.send(beat)
            began = time.monotonic()
            time_for_next = began + INTERVAL_S
            while link.poll(max(0, int((time_for_next - time.monotonic()) * 1000))):
                if take(link) is not None:
                    heard = time.monotonic()
            excess = time.monotonic() - began - LONGEST_TURN_S
            if excess > 0:
                heard = min(heard + excess, time.monotonic())
            elif time.monotonic() - heard > timeout:
                logger.error(NO_SIGN_OF_ENGINE, timeout)
                sys.stderr.flush()
                os._exit(1)
    except zmq.ContextTerminated:
        link.close()
