"""Workers as Ray actors, on one machine or on a cluster's. Importing this loads neither torch nor Ray.

Ray places and starts them, and tells when one has ended; plans and replies go the way of external workers, past Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from ..config import EngineConfig, ResolvedConfig
from ..errors import ConfigError
from ..worker.addresses import is_loopback, is_wildcard, split_tcp
from ..worker.link_key import LinkKey
from ..worker.process import WORKER_CLASS
from ..worker.sockets import SIGNAL_CHECK_MS
from .external import CALL_AGAIN_S, ExternalExecutor
from .ray_actor import RayWorker, StepaheadWorker
from .registration import Addresses

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 << 20
"""Nothing goes through it, and Ray takes no less."""
_LAST_WORD_S = 5.0
_CONNECT_S = 5.0


class RayExecutor(ExternalExecutor):
    """Joins the cluster that Ray's own variable RAY_ADDRESS names; without it, a Ray of this engine alone is started
    on this machine and ended with it."""

    def __init__(self, config: ResolvedConfig, worker_class: str = WORKER_CLASS) -> None:
        self._cluster = _Cluster(config.settings)
        super().__init__(config, worker_class)

    def _bind(self) -> Addresses:
        self._cluster.join()
        return super()._bind()

    def _link_key(self) -> LinkKey:
        given = super()._link_key()
        if given is not None:
            return given
        public, secret = zmq.curve_keypair()
        return LinkKey(secret, public)

    def _where_to_listen(self) -> str:
        """Where the settings leave it at loopback, a cluster's other machines need this one's address among them."""
        asked = super()._where_to_listen()
        if self._cluster.is_ours or not asked.startswith("tcp://") or not is_loopback(split_tcp(asked)[0]):
            return asked
        return f"tcp://{self._cluster.host}:{split_tcp(asked)[1]}"

    def _start_workers(self, address: str) -> None:
        assert self.key is not None
        host, port = split_tcp(address) if address.startswith("tcp://") else ("", 0)
        if is_wildcard(host):
            address = f"tcp://{self._cluster.host}:{port}"
        seats = self._cluster.take_seats()
        for rank, seat in enumerate(seats):
            worker = RayWorker(
                address=address,
                rank=rank,
                local_rank=0,  # Ray shows an actor its own GPU alone
                local_size=sum(other.node == seat.node for other in seats),
                secret=self.key.secret,
                public=self.key.public,
            )
            self._watch_sentinel(self._cluster.start(seat, msgspec.msgpack.encode(worker)), rank)
        self._call_at = time.monotonic() + CALL_AGAIN_S

    def _how_to_come(self) -> str:
        return "Ray has started them; its logs say more"

    def _exit_reason(self, rank: int) -> str:
        return self._cluster.exit_reason(rank) or super()._exit_reason(rank)

    def _end_workers(self, grace: float) -> None:
        super()._end_workers(grace)
        self._cluster.leave()


@dataclass(frozen=True)
class _Seat:
    """Room for a rank. bundle: its index in the placement group. node: Ray's id of the machine."""

    node: str
    bundle: int


class _Cluster:
    """Ray as this executor uses it. is_ours: whether we started it."""

    def __init__(self, settings: EngineConfig) -> None:
        self._settings = settings
        self._address = os.environ.get("RAY_ADDRESS")
        self.is_ours = not self._address
        self._ray: Any = None
        self._group: Any = None
        self._bundle: dict[str, int] = {}
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._ends = _Ends()
        self._quiet = contextlib.ExitStack()

    @property
    def host(self) -> str:
        """This machine's address in the cluster, in brackets if it has colons."""
        address = str(self._ray.util.get_node_ip_address())
        return f"[{address}]" if ":" in address else address

    def join(self) -> None:
        """Raises: ConfigError."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
        if self.is_ours:
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # or Ray leaves one where others can read it
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"executor 'ray' needs Ray: install stepahead with its extra `ray` ({error})") from error
        if self._address:
            _check_reachable(self._address)
        if ray.is_initialized():
            raise ConfigError("executor 'ray' needs a process in which Ray has not been started")
        options: dict[str, Any] = {"address": self._address}
        if self.is_ours:
            options = {
                "address": "local",
                "_node_ip_address": "127.0.0.1",
                "num_cpus": self._settings.world_size,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "include_dashboard": False,
            }
        self._quiet.enter_context(contextlib.redirect_stdout(sys.stderr))  # where Ray prints what its processes say
        with _own_sigterm():
            try:
                self._ray = ray
                ray.init(**options, configure_logging=False, log_to_driver=True)
            except (ConnectionError, ValueError, RuntimeError) as error:
                where = "be started here" if self.is_ours else f"be joined at RAY_ADDRESS={self._address}"
                asks = not self.is_ours and "RAY_AUTH_MODE" not in os.environ
                hint = "; if it asks for a token, set RAY_AUTH_MODE=token here too" if asks else ""
                raise ConfigError(f"Ray cannot {where}: {error}{hint}") from error

    def take_seats(self) -> list[_Seat]:
        """One for each rank, those of one machine in a row. Waits until there is room. Raises: ConfigError when the
        Ray of this machine will never have it."""
        from ray.util.placement_group import placement_group, placement_group_table

        ray, wanted = self._ray, self._settings.world_size
        kind = self._settings.device
        if kind == "auto":
            kind = "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
        resource = "CPU" if kind == "cpu" else "GPU"
        self._bundle = {resource: 1}
        there = int(ray.cluster_resources().get(resource, 0))
        if self.is_ours and there < wanted:
            raise ConfigError(f"{wanted} ranks need {wanted} {resource}s; Ray finds {there} on this machine")
        self._group = placement_group([self._bundle] * wanted, strategy="PACK")
        began = time.monotonic()
        call_at = began + CALL_AGAIN_S
        while not self._group.wait(SIGNAL_CHECK_MS / 1000):
            if time.monotonic() > began + self._settings.join_timeout:
                seconds = f"{self._settings.join_timeout:g} s (join_timeout)"
                raise ConfigError(f"no room in Ray's cluster within {seconds}: {wanted} {resource}s, of {there} in all")
            if time.monotonic() > call_at:
                call_at = time.monotonic() + CALL_AGAIN_S
                logger.warning("waiting for room in Ray's cluster: %d %ss, of %d in all", wanted, resource, there)
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        here = ray.get_runtime_context().get_node_id()
        seats = [_Seat(node, int(bundle)) for bundle, node in nodes.items()]
        return sorted(seats, key=lambda seat: (seat.node != here, seat.node, seat.bundle))

    def start(self, seat: _Seat, message: bytes) -> int:
        """A worker. Returns: a descriptor that becomes readable when it has ended; the caller closes it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placed = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=seat.bundle)
        kind = self._ray.remote(StepaheadWorker)
        actor = kind.options(
            num_cpus=self._bundle.get("CPU", 0), num_gpus=self._bundle.get("GPU", 0), scheduling_strategy=placed
        ).remote()
        run = actor.run.remote(message)
        self._actors.append(actor)
        self._runs.append(run)
        return self._ends.watch(run.future().add_done_callback)

    def exit_reason(self, rank: int) -> str | None:
        """None when Ray has not seen it end."""
        try:
            return f"{self._ray.get(self._runs[rank], timeout=_LAST_WORD_S)}; see its error output"
        except self._ray.exceptions.GetTimeoutError:
            return None
        except self._ray.exceptions.RayError as error:
            return f"was lost by Ray: {str(error).strip()}"

    def leave(self) -> None:
        """Safe at any time, and twice."""
        self._ends.stop()
        ray, self._ray = self._ray, None
        if ray is not None and ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
            ray.shutdown()
        self._actors.clear()
        self._runs.clear()
        self._quiet.close()


class _Ends:
    """Pipes that close when something ends. Ray tells that in threads of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: set[int] = set()

    def watch(self, call_at_end: Callable[[Callable[[Any], None]], None]) -> int:
        """Returns: the end to read from."""
        reader, writer = os.pipe()
        with self._lock:
            self._writers.add(writer)
        call_at_end(lambda _: self._close([writer]))
        return reader

    def stop(self) -> None:
        self._close(list(self._writers))

    def _close(self, writers: Sequence[int]) -> None:
        with self._lock:
            for writer in self._writers.intersection(writers):
                os.close(writer)
            self._writers.difference_update(writers)


def _check_reachable(address: str) -> None:
    """Ray itself tries for a minute and a half. address: RAY_ADDRESS, which may also be a word."""
    if not re.fullmatch(r"(ray://)?[^/]+:\d+", address):
        return
    try:
        socket.create_connection(split_tcp(address.removeprefix("ray://")), _CONNECT_S).close()
    except (OSError, UnicodeError, OverflowError) as error:  # the last two: no name, no port
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"RAY_ADDRESS={address}: nobody answers there ({reason})") from error


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray puts a handler of its own in the place of ours."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
