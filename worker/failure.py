"""A raised error as a message, whatever its text is. Importing this loads no torch: that this fails is reported too."""

from __future__ import annotations

import traceback

from ..errors import ConfigError, LinkLostError, PeerLostError
from .messages import Failure

_LONGEST_TEXT = 1 << 16


def text_of(error: BaseException) -> str:
    """The error's message, as text that can be encoded."""
    try:
        return _sendable(str(error))
    except Exception:
        return "(its message cannot be shown)"


def traceback_of(error: BaseException) -> str:
    """As text that can be encoded."""
    try:
        return _sendable("".join(traceback.format_exception(error)))
    except Exception:  # of one of its causes
        return f"{''.join(traceback.format_tb(error.__traceback__))}{type(error).__name__}: {text_of(error)}"


def _sendable(text: str) -> str:
    """`text` with what cannot be encoded, as in a file name that is no UTF-8, written out; its ends, if it is long."""
    if len(text) > _LONGEST_TEXT:
        text = f"{text[: _LONGEST_TEXT // 2]} … {text[-_LONGEST_TEXT // 2 :]}"
    return text.encode(errors="backslashreplace").decode()


def failure(rank: int, error: BaseException, call_id: int | None = None) -> Failure:
    """With the rank's own traceback. A ConfigError's message is meant for users, so it stays as it is; that a link was
    lost needs no traceback."""
    user_error = isinstance(error, ConfigError)
    lost_link = isinstance(error, LinkLostError)
    return Failure(
        rank=rank,
        message=text_of(error) if user_error or lost_link else f"{type(error).__name__}: {text_of(error)}",
        traceback="" if lost_link else traceback_of(error),
        call_id=call_id,
        user_error=user_error,
        lost_peer=isinstance(error, PeerLostError) and call_id is None,
    )
