"""A Ray cluster as a pool: one that runs, by its address, or one of this machine's own cores.

Every machine of a cluster needs this package and the same Python. Pieces are passed out one to a
core (or to a machine) as these become free, and passed out again when a worker or its machine is
gone. Nothing is reported to anybody: usage statistics are off, and a Ray that is started here has
no dashboard and listens on this machine alone.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from foretell.errors import InputError
from foretell.pool.pool import LOCAL, TRIES, OnProgress, given_up, silent

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # as Ray announces; it warns otherwise
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
_HERE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # no: one machine, which listens on 127.0.0.1 alone
_PATIENCE = 5.0  # seconds for a cluster to answer the door
_AGAIN = 1.0  # seconds after which it is seen whether machines have come or gone


@contextmanager
def connected(address: str) -> Iterator[OnRay]:
    """The cluster at an address, or a new one on this machine that ends with the block."""
    ray = _ray()
    if ray.is_initialized():
        yield OnRay(ray)  # the one that joined it leaves it
        return
    # Ray prints to stdout when a worker dies, where answers go too.
    with redirect_stdout(sys.stderr), _local_only(ray, address):
        _connect(ray, address)
        try:
            yield OnRay(ray)
        finally:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address == LOCAL:
        options["include_dashboard"] = False
    try:
        _check_reachable(address)
        ray.init(address, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"no Ray cluster answers at `{address}`: {str(error).splitlines()[0][:200]}",
            hint="start one with `ray start --head`, or let one be started: --on-ray local",
        ) from None


def _check_reachable(address: str) -> None:
    """An error at once where nothing is there: Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), _PATIENCE).close()


@contextmanager
def _local_only(ray: Any, address: str) -> Iterator[None]:
    """While a Ray of our own runs, tell it and its processes that there is no other machine."""
    constants = ray._private.ray_constants  # what it made of the variable when it was imported
    before = constants.ENABLE_RAY_CLUSTER
    if address == LOCAL:
        os.environ[_HERE], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        if address == LOCAL:
            os.environ.pop(_HERE, None)


def _ray() -> Any:
    for name, value in _QUIET.items():  # some are read when it is imported
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise InputError("Ray is not installed", hint="pip install 'foretell[ray]'") from None
    return ray


@dataclass
class OnRay:
    """Workers of a Ray cluster."""

    ray: Any
    died: int = 0
    tries: Counter[int] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        """Cores of all machines."""
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def map(
        self, work: Callable[[Any], Any], items: Sequence[Any], tell: OnProgress = silent,
        *, by_machine: bool = False,
    ) -> list[Any]:  # fmt: skip
        """`work` of each item, in their order; `by_machine` does one at a time on each machine."""
        shared = self.ray.put(work)  # once, not with each item
        todo, found = deque(range(len(items))), dict[int, Any]()
        under_way: dict[Any, tuple[int, str]] = {}
        self.tries.clear()
        try:
            while len(found) < len(items):
                for place in self._free([at for _, at in under_way.values()], by_machine):
                    if todo:
                        k = todo.popleft()
                        under_way[self._submit(shared, items[k], place)] = k, place
                ready, _ = self.ray.wait(list(under_way), timeout=_AGAIN)
                for ref in ready:
                    k, _ = under_way.pop(ref)
                    if self._collect(ref, k, items[k], found):
                        tell(len(found), len(items))
                    else:
                        todo.append(k)
        finally:
            for ref in under_way:  # only where something went wrong
                self.ray.cancel(ref, force=True)
        return [found[k] for k in range(len(items))]

    def _free(self, taken: list[str], by_machine: bool) -> list[str]:
        """Where a piece may begin now: names of machines, or as many blanks as there are cores."""
        if not by_machine:
            return [""] * (self.size - len(taken))
        alive = [node["NodeID"] for node in self.ray.nodes() if node["Alive"]]
        return [node for node in alive if node not in taken]

    def _submit(self, work: Any, item: Any, place: str) -> Any:
        """A piece on its way; tried again here, not by Ray, so that each death is counted."""
        options: dict[str, Any] = {"max_retries": 0, "num_cpus": 1}
        if place:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place, soft=False)
        return self.ray.remote(_call).options(**options).remote(work, item)

    def _collect(self, ref: Any, k: int, item: Any, found: dict[int, Any]) -> bool:
        """Keep an answer; False where the one who worked on it is gone."""
        errors = self.ray.exceptions
        try:
            found[k] = self.ray.get(ref)
            return True
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            self.died += 1
            self.tries[k] += 1
            if self.tries[k] == TRIES:
                raise given_up(item, type(error).__name__) from None
            return False


def _call(work: Callable[[Any], Any], item: Any) -> Any:
    return work(item)
