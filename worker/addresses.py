"""Where an engine and its workers meet: tcp://HOST:PORT or ipc://FILE. Importing this loads neither zmq nor torch."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat

from ..errors import ConfigError


def split_tcp(address: str) -> tuple[str, int]:
    """Host (without the brackets of an IPv6 address) and port of "tcp://host:port"; an impossible port is -1."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port) if port.isdecimal() and int(port) < 1 << 16 else -1


def is_utf8(path: str) -> bool:
    """False for a path whose bytes are none: no message takes it."""
    return not any("\ud800" <= character <= "\udfff" for character in path)


def is_loopback(host: str) -> bool:
    """Of an address or name without brackets: whether only this machine can reach it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether a socket bound there listens on every network."""
    return host in ("*", "0.0.0.0", "::")


def tcp_host(address: str, name: str) -> str | None:
    """Of an address that somebody typed; None for ipc://. name: of the setting or option, for the message.

    Raises: ConfigError when it is no address.
    """
    if address.startswith("ipc://"):
        return None
    host, port = split_tcp(address)
    if not address.startswith("tcp://") or not host or port < 0:
        raise ConfigError(f"{name}={address!r}: must be tcp://HOST:PORT or ipc://FILE")
    return host


def check_private(address: str, name: str) -> None:
    """Nobody else can put a socket where an ipc:// address is. Raises: ConfigError."""
    folder = os.path.dirname(address.removeprefix("ipc://")) or "."
    try:
        status = os.stat(folder)
    except OSError as error:
        raise ConfigError(f"{name}={address!r}: {folder}: {error.strerror}") from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{name}={address!r}: the folder {folder} must be yours alone: chmod 700 it")


def check_engine(address: str, has_key: bool) -> None:
    """For a worker, before it connects: whoever answers there can run code in it. Raises: ConfigError."""
    host = tcp_host(address, "--connect")
    if host is None:
        check_private(address, "--connect")
    elif not has_key and not is_loopback(host):
        raise ConfigError(
            f"--connect={address!r}: an engine on another machine must prove itself: give its key file with --key-file"
        )
