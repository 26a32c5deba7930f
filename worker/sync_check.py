"""STEPAHEAD_SYNC_CHECK=warn|error: reports whatever makes the host wait for the device in the step path.

On CUDA torch's own sync debug mode sees the waits. A CPU has none, so there every operation is looked at for what
would be one on CUDA: that way a machine without a GPU finds them too. What a kernel's CPU version reads through
numpy is not looked at. Start-up and the output-copy thread, which is there to wait, are not watched.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..config import ResolvedConfig
from ..errors import ConfigError, StepaheadError
from .async_output import AsyncOutput
from .device import Device
from .messages import GrammarMasks, StepPlan
from .model_runner import ModelRunner
from .models.base import Model
from .parallel import ONLY_STAGE, PipelineStage
from .trace import Lane

logger = logging.getLogger(__name__)

VARIABLE = "STEPAHEAD_SYNC_CHECK"

_ACTIONS = ("off", "warn", "error")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAMES = 12
_CUDA_MESSAGE = "synchronizing CUDA operation"

_WAITING_OPERATIONS = frozenset(
    (
        "_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "bincount", "unique_dim",
        "unique_consecutive", "unique_dim_consecutive", "_unique", "_unique2", "_linalg_check_errors",
    )
)  # fmt: skip
"""Their result, or its shape, is known on the host only when the device has computed it."""

_INDEXING = frozenset(("index", "index_put_", "index_put", "_index_put_impl_"))
_COMPOSITE_KEY = "CompositeImplicitAutograd"
_HARMLESS = frozenset(
    (
        "to", "reshape", "flatten", "unflatten", "linear", "matmul", "contiguous", "chunk", "split", "numpy_T",
        "resolve_conj", "resolve_neg", "scaled_dot_product_attention", "type_as", "expand_as", "diff", "square",
        "__and__", "__or__", "__xor__", "__iand__", "__ior__", "__ixor__", "floor_divide",
    )
)  # fmt: skip
"""The frequent ones among the operations that are made of others. None of their parts waits."""

_HOST_COPIES = frozenset((torch.Tensor.tolist, torch.Tensor.cpu))
_UPLOADS = frozenset((torch.tensor, torch.as_tensor))


def make_runner(
    config: ResolvedConfig,
    device: Device,
    model: Model,
    num_blocks: int,
    max_model_len: int,
    lane: Lane | None = None,
    stage: PipelineStage = ONLY_STAGE,
) -> ModelRunner:
    """A ModelRunner, watched if the environment says so. Raises: ConfigError when it says something else."""
    action = os.environ.get(VARIABLE) or "off"
    if action not in _ACTIONS:
        raise ConfigError(f"{VARIABLE}={action!r}: must be one of {', '.join(_ACTIONS)}")
    if action == "off":
        return ModelRunner(config, device, model, num_blocks, max_model_len, lane, stage)
    logger.info("%s=%s: every step is watched, and slower for it", VARIABLE, action)
    check = sync_check(action, device.torch_device)
    return WatchedRunner(check, config, device, model, num_blocks, max_model_len, lane, stage)


class WatchedRunner(ModelRunner):
    """Watches the main thread in execute and sample, and on CPU the device thread in launched work."""

    def __init__(self, check: SyncCheck, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._check = check

    def execute(self, plan: StepPlan) -> None:
        with self._check.watching():
            super().execute(plan)

    def sample(self, step_id: int, grammar: GrammarMasks | None) -> AsyncOutput:
        with self._check.watching():
            return super().sample(step_id, grammar)

    def _receive(self, *arguments: Any) -> None:
        with self._check.watching():
            super()._receive(*arguments)

    def _pass_on(self, *arguments: Any) -> None:
        with self._check.watching():
            super()._pass_on(*arguments)

    def _forward(self, *arguments: Any) -> None:
        with self._check.watching():
            super()._forward(*arguments)

    def _sample(self, *arguments: Any) -> None:
        with self._check.watching():
            super()._sample(*arguments)


class SyncCheck(ABC):
    """raises: whether a wait is an error, or is logged once for each place in the code."""

    def __init__(self, raises: bool) -> None:
        self.raises = raises
        self._told: set[tuple[str, int | None]] = set()

    @abstractmethod
    def watching(self) -> contextlib.AbstractContextManager[None]:
        """For the calling thread. Raises: StepaheadError naming file and line, from inside."""

    def report(self, what: str, stack: traceback.StackSummary) -> None:
        """stack: outermost first. Raises: StepaheadError when a wait is an error."""
        own = [frame for frame in stack if not _is_hidden(frame.filename)]
        place = own[-1] if own else stack[-1]
        message = (
            f"{what} makes the host wait for the device in the step path, at {place.filename}:{place.lineno} "
            f"in {place.name}"
        )
        if self.raises:
            raise StepaheadError(message)
        if (place.filename, place.lineno) not in self._told:
            self._told.add((place.filename, place.lineno))
            logger.warning("%s\n%s", message, "".join(traceback.format_list(own[-_FRAMES:])).rstrip())


def sync_check(action: str, device: torch.device) -> SyncCheck:
    """action: "warn" or "error"."""
    kind = CudaSyncCheck if device.type == "cuda" else OperationCheck
    return kind(raises=action == "error")


class CudaSyncCheck(SyncCheck):
    """Torch's mode is the whole process's: the output-copy thread waits on events only, which it does not see."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            if not self.raises:
                warnings.filterwarnings("always", message=f".*{_CUDA_MESSAGE}")
                warnings.showwarning = self._show  # type: ignore[assignment]
            torch.cuda.set_sync_debug_mode("error" if self.raises else "warn")
            try:
                yield
            except RuntimeError as error:
                if isinstance(error, StepaheadError) or _CUDA_MESSAGE not in str(error):
                    raise
                self._raise(error)
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def _raise(self, error: RuntimeError) -> None:
        try:
            self.report("an operation", traceback.extract_tb(error.__traceback__))
        except StepaheadError as report:
            raise report from error

    def _show(self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        if _CUDA_MESSAGE in str(message):
            self.report("an operation", traceback.extract_stack())
        else:
            logger.warning("%s", warnings.formatwarning(message, category, filename, lineno).rstrip())


class OperationCheck(SyncCheck):
    """Looks at each operation on CPU tensors: what reads a value, or a shape that depends on values."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with _Operations(self), _Methods(self):
            yield

    def see(self, what: str) -> None:
        self.report(what, traceback.extract_stack())


class _Kind(enum.Enum):
    PLAIN, WAITS, INDEXES, REPEATS, COMPOSITE = range(5)


class _Operations(TorchDispatchMode):
    """What C++ computes, however Python came to it."""

    def __init__(self, check: OperationCheck) -> None:
        super().__init__()
        self._check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind is _Kind.COMPOSITE:
            # Without autograd these arrive whole: look at what they are made of.
            with self:
                return func.decompose(*args, **kwargs)
        if kind is not _Kind.PLAIN and (wait := _wait_of(kind, func, args, kwargs)):
            self._check.see(wait)
        return func(*args, **kwargs)


@functools.cache
def _kind(func: Any) -> _Kind:
    name = func.overloadpacket.__name__
    if name in _WAITING_OPERATIONS:
        return _Kind.WAITS
    if name in _INDEXING:
        return _Kind.INDEXES
    if name == "repeat_interleave" and func._overloadname == "Tensor":
        return _Kind.REPEATS
    if name == "where" and func._overloadname != "default":
        return _Kind.PLAIN
    if name not in _HARMLESS and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE_KEY):
        return _Kind.COMPOSITE
    return _Kind.PLAIN


def _wait_of(kind: _Kind, func: Any, args: Any, kwargs: Any) -> str | None:
    """What waits in a call of an operation, for people; None when nothing does."""
    if kind is _Kind.WAITS:
        name = func.overloadpacket.__name__
        return _NAMES.get(name, name)
    if kind is _Kind.INDEXES:
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        return "indexing with a boolean mask" if masks else None
    return "repeat_interleave without output_size" if kwargs.get("output_size") is None else None


_NAMES = {"_local_scalar_dense": "reading a tensor's value", "_unique2": "unique", "_unique": "unique"}


class _Methods(TorchFunctionMode):
    """What never reaches an operation when all tensors are on the CPU."""

    def __init__(self, check: OperationCheck) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HOST_COPIES:
            self._check.see(f"{func.__name__}()")
        elif func is torch.Tensor.to and _names_the_host(args[1:2], kwargs):
            self._check.see("to('cpu')")
        elif func is torch.Tensor.new_tensor or (func in _UPLOADS and kwargs.get("device") is not None):
            self._check.see(f"{func.__name__}() of host values")
        return func(*args, **kwargs)


def _names_the_host(args: Any, kwargs: Any) -> bool:
    """Written out: a torch.device may be where the model is, which on CUDA is not the host."""
    return any(isinstance(target, str) and target == "cpu" for target in (*args, kwargs.get("device")))


def _is_hidden(filename: str) -> bool:
    """Torch's own frames and those of watching say nothing about where the wait is."""
    return filename.startswith(_TORCH) or filename in (__file__, contextlib.__file__, warnings.__file__)
