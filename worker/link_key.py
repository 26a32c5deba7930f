"""The key of an engine's TCP links. Importing this loads no torch.

One CURVE secret key in a file is known to both ends: the engine proves itself with it, and so does every worker.
What it gives is encryption and the certainty that the other end has the file.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    import zmq
    from zmq.auth.thread import ThreadAuthenticator

ZAP_DOMAIN = "stepahead"

GIVE_UP_WEIGHT = 3
"""See weight_of_failure."""

_FIRST_LINE = "# stepahead: the secret key of an engine's links. Whoever has it can run code on the workers.\n"
_KEY_CHARACTERS = 40
_LONGEST_FILE = 4096


@dataclass(frozen=True, repr=False)
class LinkKey:
    """secret, public: CURVE keys in Z85, 40 bytes each."""

    secret: bytes
    public: bytes

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Before bind: who connects must have the key (see `admit_only`)."""
        import zmq

        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.CURVE_SERVER, 1)

    def present(self, socket: zmq.Socket[bytes]) -> None:
        """Before connect."""
        import zmq

        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def write_key_file(path: str | Path) -> None:
    """A new key, for its owner alone to read. Raises: ConfigError when the file is there or cannot be made."""
    import zmq

    _, secret = zmq.curve_keypair()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already; a key is not overwritten: choose another name or remove it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(_FIRST_LINE + secret.decode() + "\n")


def read_key_file(path: str | Path) -> LinkKey:
    """Raises: ConfigError when others could read it too, or it holds no key."""
    import zmq

    try:
        with open(path, encoding="ascii", errors="replace") as file:
            status = os.fstat(file.fileno())
            text = file.read(_LONGEST_FILE)
    except OSError as error:
        raise ConfigError(f"key_file={str(path)!r}: {error.strerror}; `stepahead keygen FILE` makes one") from error
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"key_file={str(path)!r} is open to others (mode {mode:04o}): chmod 600 it, or make a new one"
        )
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    try:
        if len(lines) != 1 or len(lines[0]) != _KEY_CHARACTERS:
            raise ValueError
        secret = lines[0].encode()
        return LinkKey(secret, zmq.curve_public(secret))
    except (ValueError, zmq.ZMQError):
        raise ConfigError(f"key_file={str(path)!r} holds no key; `stepahead keygen FILE` makes one") from None


class _OnlyKey:
    def __init__(self, key: LinkKey) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key.public


def admit_only(context: zmq.Context[zmq.Socket[bytes]], key: LinkKey) -> ThreadAuthenticator:
    """Starts what decides about every connection to a guarded socket of the context; stop() it before the context."""
    from zmq.auth.thread import ThreadAuthenticator

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=_OnlyKey(key))
    return authenticator


def weight_of_failure(event: int) -> int:
    """event: of a connecting socket's monitor. When the weights add up to GIVE_UP_WEIGHT the other end does not want
    us. One that hangs up in the middle of a handshake says so less clearly: it may just have ended, or forward a port
    behind which nobody listens yet."""
    import zmq

    if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
        return GIVE_UP_WEIGHT
    return 1 if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else 0


def explain_refused_link(address: str, key: LinkKey | None) -> str:
    if key is None:
        return f"{address} does not talk to us: is it an engine, and does it have a key? Then give it: --key-file"
    return f"{address} does not take our key: do both ends have the same key file, or none?"
