"""The link on which the engine's messages come, and what becomes of the links to it. Importing this loads no torch.

A lost link comes up again by itself, but what was under way on it is gone, and whoever is at the other end then does
not know us. So once the engine has taken a worker, the loss of a link is that worker's end.
"""

from __future__ import annotations

import logging

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import LinkLostError
from .link_key import LinkKey
from .sockets import SIGNAL_CHECK_MS, connect, open_socket, take

logger = logging.getLogger(__name__)

PROBE = b""
"""What the engine sends to see whether it still reaches a worker. It says nothing."""

LINK_LOST = "lost the link to the engine; leaving"

_LAST_WORD_MS = 500
"""How much later than the end of one link what was said on the other may come."""

_LOSSES = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


class EngineLink:
    """socket: a DEALER. events: its monitor's. Used by one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = open_socket(context, zmq.DEALER)
        self.events = self.socket.get_monitor_socket(_EVENTS)
        self._watched: list[zmq.Socket[bytes]] = []
        self._is_lost = False
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)

    def connect(self, address: str, key: LinkKey | None) -> None:
        if key is not None:
            key.present(self.socket)
        connect(self.socket, address)

    def watch(self, other: zmq.Socket[bytes]) -> None:
        """From now on receive() raises when this link is lost, or `other`, which is still to be connected."""
        self._watched = [self.events, other.get_monitor_socket(_LOSSES)]
        for events in self._watched:
            self._poller.register(events, zmq.POLLIN)

    def receive(self) -> list[bytes]:
        """Waits for a message. Raises: LinkLostError, when all that came before the loss has been taken."""
        while True:
            frames = take(self.socket)
            if frames is None:
                if self._is_lost and not self.socket.poll(_LAST_WORD_MS):
                    logger.error("%s", LINK_LOST)
                    raise LinkLostError
                ready = dict(self._poller.poll(SIGNAL_CHECK_MS))
                lost = [events for events in self._watched if events in ready and _tells_of_loss(events)]
                self._is_lost = self._is_lost or bool(lost)
            elif frames != [PROBE]:
                return frames

    def close(self) -> None:
        """After `other` has been closed."""
        self.socket.disable_monitor()
        self.socket.close()
        self.events.close()
        for events in self._watched:
            events.close()


def _tells_of_loss(events: zmq.Socket[bytes]) -> bool:
    """Takes the next event."""
    return bool(recv_monitor_message(events)["event"] & _LOSSES)
