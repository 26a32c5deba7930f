"""Triton, imported when a kernel is first launched: a CPU-only run need not pay for it, macOS has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class LazyKernel:
    """A function in Triton's language. Launched as kernel[grid](...)."""

    def __init__(self, function: Callable[..., None], do_not_specialize: Sequence[str]) -> None:
        self.function = function
        self.do_not_specialize = do_not_specialize

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.load()[grid]

    def load(self) -> Any:
        """Replaces every LazyKernel of the function's module by what @triton.jit would have made of it at
        import, and gives the module the name `tl`. Later launches find the replacement and not this object.
        """
        import triton
        import triton.language

        module = self.function.__globals__
        module["tl"] = triton.language
        for name, value in list(module.items()):
            if isinstance(value, LazyKernel):
                module[name] = triton.jit(value.function, do_not_specialize=value.do_not_specialize)
        return module[self.function.__name__]


def kernel(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """do_not_specialize: integers that change from step to step, and tensors that may be slices of a staging
    buffer. Triton would otherwise compile again, in the middle of serving, when such an integer becomes 1 or a
    multiple of 16, or when such a slice does not begin at 16 bytes."""
    return lambda function: LazyKernel(function, do_not_specialize)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, n >= 1."""
    return 1 << (n - 1).bit_length()


def ceil_div(n: int, divisor: int) -> int:
    return -(-n // divisor)
