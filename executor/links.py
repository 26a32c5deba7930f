"""Sockets that others may reach: bound where the settings say, closed to what is no message of ours, and watched."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import threading
from collections.abc import Mapping, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..config import ResolvedConfig
from ..errors import ConfigError
from ..worker.addresses import split_tcp
from ..worker.logs import Complaints

logger = logging.getLogger(__name__)

_ANSWER_LIMIT = 64 << 20
"""For what a collective_rpc or a profile returns."""
_LOGPROB_BYTES = 8
_ROW_BYTES = 64
_MOST_WAITING = 1000
_MOST_DESCRIPTORS = 1 << 16
_ASK_EVERY_MS = 1000
_LONGEST_MS = 6_553_500  # of HEARTBEAT_TTL
_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


def allow_many_connections() -> None:
    """Each stranger's has a descriptor of this process until its handshake has failed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems take less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def reply_limit(config: ResolvedConfig) -> int:
    """The longest frame, in bytes, that a worker may send: all tokens of a step with all their log-probabilities."""
    settings = config.settings
    tokens = settings.max_num_batched_tokens + settings.max_num_seqs
    return _ANSWER_LIMIT + tokens * (_ROW_BYTES + (settings.max_logprobs + 1) * _LOGPROB_BYTES)


def limit(link: zmq.Socket[bytes], frame_bytes: int) -> None:
    """A peer that sends longer frames is disconnected; one that sends faster than we read is held up; one that does not
    read what we send gets no more of it, and on the plans' link counts as lost."""
    link.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
    link.setsockopt(zmq.RCVHWM, _MOST_WAITING)
    link.setsockopt(zmq.SNDHWM, _MOST_WAITING)


def drop_silent_peer(socket: zmq.Socket[bytes], address: str, seconds: float) -> None:
    """Before bind: a connection of a tcp:// address whose other end is not heard of for so long counts as lost, at both
    ends. A cable that is cut says nothing."""
    if address.startswith("tcp://"):
        socket.setsockopt(zmq.HEARTBEAT_IVL, _ASK_EVERY_MS)
        milliseconds = min(int(seconds * 1000), _LONGEST_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, milliseconds)
        socket.setsockopt(zmq.HEARTBEAT_TTL, milliseconds)


def bind(link: zmq.Socket[bytes], address: str, name: str) -> str:
    """address: the setting executor_address; `name` other than "plans" gets an address beside it. Returns: the bound
    address. Raises: ConfigError."""
    if address.startswith("ipc://"):
        wanted = address if name == "plans" else f"{address}-{name}"
    else:
        host, port = split_tcp(address)
        wanted = f"tcp://{_numeric(host, address)}:{port if name == 'plans' else 0}"
        link.setsockopt(zmq.IPV6, int("[" in wanted))
    try:
        link.bind(wanted)
    except zmq.ZMQError as error:
        raise ConfigError(f"executor_address={address!r} cannot be bound: {error}") from error
    return link.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]


def _numeric(host: str, address: str) -> str:
    """zmq binds numbers, not names."""
    if host == "*":
        return host
    try:
        family, _, _, _, (number, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"executor_address={address!r}: no such host here: {error}") from error
    return f"[{number}]" if family == socket.AF_INET6 else str(number)


class LinkWatch:
    """A thread that says when a connection fails: libzmq itself drops it without a word.

    links: by name. limits: their longest frames in bytes, for the message. Whoever ends a link in another thread
    disables its monitor first.
    """

    def __init__(self, links: Mapping[str, zmq.Socket[bytes]], limits: Mapping[str, int]) -> None:
        self._links = links
        self._limits = limits
        self._complaints = Complaints(logger)
        self._is_over = False
        self._events = {name: link.get_monitor_socket(_EVENTS) for name, link in links.items()}
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="link-watch", daemon=True)
        self._thread.start()

    def hush(self) -> None:
        """From now on connections end because everything does."""
        self._is_over = True

    def stop(self) -> None:
        """Before the links that the caller owns are closed, and after the others have been."""
        for link in self._links.values():
            if not link.closed:
                link.disable_monitor()  # first: libzmq would wait for ever to send an event that nobody takes
        os.close(self._wake_writer)
        self._thread.join()
        os.close(self._wake_reader)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        for events in self._events.values():
            poller.register(events, zmq.POLLIN)
        failed: Sequence[str] = ()
        while self._wake_reader not in (ready := dict(poller.poll())):
            for name, events in self._events.items():
                if events in ready:
                    failed = self._tell(name, recv_monitor_message(events)["event"], failed)
        for events in self._events.values():
            events.close()

    def _tell(self, name: str, event: int, failed: Sequence[str]) -> Sequence[str]:
        """failed: links whose last event was a failed handshake, which is followed by its disconnection."""
        others = [other for other in failed if other != name]
        if self._is_over:
            return others
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            text = f"{name} link: refused somebody whose key is not the one in key_file"
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            text = f"{name} link: refused a connection: another key, none, or not our protocol"
        elif event == zmq.EVENT_DISCONNECTED and name not in failed:
            text = f"{name} link: a connection ended; the other end is gone, or sent over {self._limits[name]} bytes"
        else:
            return others
        self._complaints.log(text)
        return others if event == zmq.EVENT_DISCONNECTED else [*others, name]
