"""What the engine core asks of an executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from ..config import ResolvedConfig
    from ..worker.messages import GrammarMasks, StepOutput, StepPlan, WorkerInfo

T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """A result that arrives later. Resolved by the thread that owns the executor, inside result()."""

    def result(self) -> T_co:
        """Waits. Raises: WorkerError when a worker raised or died."""

    def done(self) -> bool:
        """True when result() would not wait. Takes what has arrived; never blocks."""


def _nothing() -> None:
    return None


class Executor(ABC):
    """Starts workers and calls them. Every method is called from one thread, the engine core's loop.

    Construction starts the workers and waits until their models are loaded.
    on_wait: called every second or more often while a step's result() waits, so that a hung step shows.
    has_failed: set before shutdown() when the engine ends otherwise than its client wants: workers that are somebody
    else's processes say so when they end.
    Raises: ConfigError when a setting or model cannot be used, WorkerError when a worker fails.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.on_wait: Callable[[], None] = _nothing
        self.has_failed = False

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Whether a second step may be started before the first has returned its tokens."""
        return False

    @abstractmethod
    def worker_infos(self) -> Sequence[WorkerInfo]:
        """One per rank, as reported after the model was loaded."""

    @abstractmethod
    def initialize_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocates the KV pool and the per-request state. Called once, before the first step."""

    @abstractmethod
    def execute_model(self, plan: StepPlan) -> Future[None]:
        """Starts the forward pass of a step on every rank; does not wait for it."""

    @abstractmethod
    def sample_tokens(self, grammar: GrammarMasks | None) -> Future[StepOutput]:
        """Starts sampling for the step that execute_model started last; does not wait for it."""

    @abstractmethod
    def collective_rpc(
        self, method: str | bytes | Callable[..., Any], args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        """Calls a Worker method by name, or callable(worker, *args), on every rank; results by rank.

        method: bytes are a callable that cloudpickle has already packed. args and results are plain values.
        timeout: seconds. Raises: WorkerError when a worker raised (the others go on) or died; ConfigError when
        it raised one; TimeoutError; TypeError when args cannot travel.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raises: WorkerError when a worker is gone, or a step has failed."""

    def watch(self, on_failure: Callable[[], None]) -> None:  # noqa: B027 (a worker in this process needs none)
        """Calls on_failure once, from another thread, when a worker is gone: an idle engine polls nothing."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stops the workers and removes what they left. Safe to call twice."""
