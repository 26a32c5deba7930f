"""Who may bind an ipc:// address. libzmq binds any: it takes the file away from whoever listens there."""

from __future__ import annotations

import contextlib
import fcntl
import os

from ..errors import ConfigError
from ..worker.addresses import check_private

_OTHER_SOCKETS = ("-replies", "-health")
"""How the paths of an engine's other sockets end: no other engine's address may be one of them."""


class AddressClaim:
    """A locked file beside the address; the kernel gives it up when this process ends, however it does.

    sockets: paths that have been bound under this claim; they go with it, because libzmq leaves them.
    Raises: ConfigError when another engine holds it, or others could write where it is.
    """

    def __init__(self, address: str) -> None:
        check_private(address, "executor_address")
        if address.endswith(_OTHER_SOCKETS):
            raise ConfigError(f"executor_address={address!r} must not end in {' or '.join(_OTHER_SOCKETS)}")
        self.sockets: list[str] = []
        self._path = f"{address.removeprefix('ipc://')}.lock"
        self._file = -1
        while self._file < 0:
            self._file = self._try(address)

    def release(self) -> None:
        for path in (*self.sockets, self._path):
            with contextlib.suppress(OSError):  # whoever made the folder may have removed it, or its rights
                os.unlink(path)
        os.close(self._file)

    def _try(self, address: str) -> int:
        """Returns: the locked file, or -1 when its last holder removed it meanwhile."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"executor_address={address!r} cannot be claimed: {error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(self._path)):
                    return file
        except OSError as error:
            os.close(file)
            held = isinstance(error, BlockingIOError)
            why = "is in use by another engine" if held else f"cannot be claimed: {error}"
            raise ConfigError(f"executor_address={address!r} {why}") from None
        os.close(file)
        return -1
