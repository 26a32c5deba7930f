"""A raised error as a message. Importing this loads no torch: a failing import of torch is reported too."""

from __future__ import annotations

import traceback

from ..errors import ConfigError, LinkLostError, PeerLostError
from .messages import Failure


def failure(rank: int, error: BaseException, call_id: int | None = None) -> Failure:
    """With the rank's own traceback. A ConfigError's message is meant for users, so it stays as it is; that a link was
    lost needs no traceback."""
    user_error = isinstance(error, ConfigError)
    lost_link = isinstance(error, LinkLostError)
    return Failure(
        rank=rank,
        message=str(error) if user_error or lost_link else f"{type(error).__name__}: {error}",
        traceback="" if lost_link else "".join(traceback.format_exception(error)),
        call_id=call_id,
        user_error=user_error,
        lost_peer=isinstance(error, PeerLostError),
    )
