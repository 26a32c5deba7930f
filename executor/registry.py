"""Executors by their names in the settings. Importing this loads no torch and no executor."""

from __future__ import annotations

from importlib import import_module

from ..errors import ConfigError
from .base import Executor

_HOME = {"mp": ("multiproc", "MultiprocExecutor"), "uni": ("uniproc", "UniProcExecutor")}


def executor_class(name: str) -> type[Executor]:
    """Raises: ConfigError."""
    if name not in _HOME:
        raise ConfigError(f"executor={name!r}: must be one of {', '.join(_HOME)}")
    module, attribute = _HOME[name]
    return getattr(import_module(f".{module}", __package__), attribute)
