"""Numba kernels for CPU tensors: compiled when first launched, run on torch's own threads. Imports no numba itself.

A kernel is written in the language of `_numba_language.py`, which its module calls `nl`. A compiled kernel is kept
on disk beside its source, or in the user's cache, as numba does: only the first start ever has to compile.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import struct
from array import array
from collections.abc import Callable
from typing import Any

import torch

LANES = 16
_ELEMENTS = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_WORTH_A_FORK = 1 << 14
"""Elements to compute before a second thread pays for waking it."""

_Entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_QuickEntry = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
"""Keeps the interpreter lock: to get it back from a busy thread would take longer than a small launch."""


class NumbaKernel:
    """A function of a launch. See `_numba_language.py`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self._compiled: dict[tuple[torch.dtype, tuple[tuple[str, int], ...]], Any] = {}

    def launch_integers(self, words: tuple[int, ...], num_tasks: int, work: int) -> None:
        """As launch, for a kernel that has neither elements nor constants."""
        self.launch(torch.float32, words, num_tasks, work, {})

    def launch(
        self, dtype: torch.dtype, words: tuple[int, ...], num_tasks: int, work: int, constants: dict[str, int]
    ) -> None:
        """Runs tasks 0 .. num_tasks.

        words: what the kernel reads by index: addresses, sizes, `float_word`s. work: about how many elements are
        computed in all. constants: sizes to compile for.
        """
        key = dtype, tuple(constants.items())
        entry = self._compiled.get(key)
        if entry is None:
            entry = self._compiled[key] = self._compile(*key)
        launch = array("q", (0, num_tasks, *words))
        address, _ = launch.buffer_info()
        if work < _WORTH_A_FORK:
            entry.quick(address)
            return
        threads = min(torch.get_num_threads(), num_tasks)
        fork_join = _fork_join()
        if threads > 1 and fork_join is not None:
            fork_join(entry, address, threads, 0)
        else:
            entry(address)

    def _compile(self, dtype: torch.dtype, constants: tuple[tuple[str, int], ...]) -> Any:
        import numba

        from . import _numba_language as nl

        _name_language(self.function.__globals__, nl)
        kind = nl.LaunchType(nl.ELEMENTS[_ELEMENTS[dtype]], constants)
        compiled = numba.cfunc(numba.types.void(kind), cache=True)(self.function)
        entry: Any = _Entry(int(compiled.address or 0))
        entry.quick = _QuickEntry(int(compiled.address or 0))
        entry.keeps = compiled  # the machine code lives as long as this
        return entry


class NumbaFunction:
    """A part of a kernel, in its module, that becomes one with it when it is compiled."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.function.__name__} can only be called by a kernel")


def _name_language(module: dict[str, Any], nl: Any) -> None:
    """Gives a kernel's module the name `nl`, and makes its NumbaFunctions callable by the kernel."""
    import numba

    module["nl"] = nl
    for name, value in list(module.items()):
        if isinstance(value, NumbaFunction):
            module[name] = numba.njit(forceinline=True)(value.function)


def runs_in_numba(x: torch.Tensor, *widths: int) -> bool:
    """Whether numba is here and its kernels take x's element type and rows of these lengths."""
    return x.is_cpu and x.dtype in _ELEMENTS and not any(width % LANES for width in widths) and numba_is_here()


def keeps_state_in_numba(x: torch.Tensor) -> bool:
    """As runs_in_numba, for kernels that compute with integers only."""
    return x.is_cpu and numba_is_here()


@functools.cache
def numba_is_here() -> bool:
    return importlib.util.find_spec("numba") is not None


@functools.cache
def float_word(value: float) -> int:
    """A float as a word of a launch."""
    return struct.unpack("q", struct.pack("d", value))[0]


@functools.cache
def _fork_join() -> Callable[..., None] | None:
    """GOMP_parallel(function, argument, threads, flags) of the OpenMP library that torch has loaded.

    A pool of our own would fight torch's for the cores: OpenMP's threads spin for a while when their work is
    done. Without it (not on Linux) kernels run on one thread.
    """
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = [_Entry, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function
