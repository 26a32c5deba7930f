"""The one exception hierarchy. Every message says what happened, with which value, and what to do."""


class StepaheadError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(StepaheadError, ValueError):
    """A setting, a model folder, or a combination of the two cannot be used."""


class InvalidRequestError(StepaheadError, ValueError):
    """A request was refused; other requests are not touched."""


class EngineDeadError(StepaheadError, RuntimeError):
    """The engine-core process or one of its workers failed; its own traceback is in the message."""


class PeerLostError(StepaheadError, RuntimeError):
    """A rank could not exchange tensors with another one. What happened to that one says more."""


class LinkLostError(StepaheadError, RuntimeError):
    """A worker has lost a link to its engine."""

    MESSAGE = "lost its link to the engine"

    def __init__(self) -> None:
        super().__init__(self.MESSAGE)


class WorkerError(StepaheadError, RuntimeError):
    """A worker raised while it ran an RPC.

    rank: the worker's global rank.
    remote_traceback: the worker's own traceback, as text.
    """

    def __init__(self, rank: int, message: str, remote_traceback: str = "") -> None:
        super().__init__(f"worker rank {rank}: {message}")
        self.rank = rank
        self.remote_traceback = remote_traceback
