"""Executors by their names in the settings. Importing this loads no torch and no executor."""

from __future__ import annotations

from importlib import import_module

from ..errors import ConfigError
from .base import Executor

_HOME = {
    "external": ".external:ExternalExecutor",
    "mp": ".multiproc:MultiprocExecutor",
    "ray": ".ray_executor:RayExecutor",
    "uni": ".uniproc:UniProcExecutor",
}


def executor_class(name: str) -> type[Executor]:
    """name: a key of _HOME, or "package.module:Class" for a class of the user's. Raises: ConfigError."""
    home = _HOME.get(name, name)
    module, colon, attribute = home.partition(":")
    if not colon:
        raise ConfigError(f"executor={name!r}: must be one of {', '.join(_HOME)}, or package.module:Class")
    try:
        found = getattr(import_module(module, __package__), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"executor={name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise ConfigError(f"executor={name!r} is not a subclass of stepahead.executor.base.Executor")
    return found
