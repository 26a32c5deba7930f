"""Functions on their way to a worker. They travel as cloudpickle's bytes, and only where nobody else can send any."""

from __future__ import annotations

from typing import Any


def pack_callable(value: Any) -> Any:
    """A callable's bytes; anything else as it is."""
    if not callable(value):
        return value
    import cloudpickle

    return cloudpickle.dumps(value)


def unpack_callable(packed: bytes) -> Any:
    """packed: from a link that nobody else can write to, which the caller has made sure of."""
    import cloudpickle

    return cloudpickle.loads(packed)
