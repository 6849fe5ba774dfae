"""The graph of a step under a plan, from one rank by itself and what links and cores cost.

Every rank has a lane for its own work and two for messages (gloo works on two at once). Work uses
the rank's share of a core, a link of the graph like any other: a busy machine is one whose cores
are worth less. Messages share one wire, also those that go opposite ways: between two ranks gloo
has one connection, in which a short message waits behind a long one and holds a thread meanwhile,
so that in measured steps they take turns. A message that is sent while its rank still computes is
late: each of gloo's threads has to find a core first (→ foretold.Known.late).
What is sent when is what `foretell.pytorch.deploy` does:

    all-reduce   buckets in order, each as soon as its gradients and all buckets before it are there
    factors      [x | g] of a layer gathered from its backward on, multiplied before the update
    ps, sharded  reduced to their owner after the backward, sent back after its update
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from foretell.graph import Builder, Graph
from foretell.plan import Plan
from foretell.pytorch.deploy.layout import Layout, by_size
from foretell.pytorch.lab import plans
from foretell.pytorch.lab.pieces import Pieces, pieces
from foretell.pytorch.lab.prices import Prices

MESSAGES = 2  # at once: ProcessGroupGloo has two threads (ProcessGroupGloo.hpp, Options::threads)


@dataclass(frozen=True)
class Knobs:
    """What bench cannot see and `fit` learns; as they stand nothing was fitted."""

    compute: float = 1.0  # of a core's seconds beside other ranks, over those alone
    wire: float = 1.0  # of a message beside work, over one by itself
    launch: float = 1.0  # of what a message costs a core, over bench
    copy: float = 1.0  # of what a gradient's way into its bucket costs, over bench
    interference: float = 1.0  # of what a message costs its rank's core, over bench
    wake: float = 1.0  # of how late a rank wakes after a wait, over bench
    stretch: float = 1.0  # power of how busy the machine was found to be
    models: Mapping[str, float] = field(default_factory=dict)  # `compute` of a model, over common
    wires: Mapping[str, float] = field(default_factory=dict)  # `wire` of a network, over common


@dataclass(frozen=True)
class Host:
    """What bench found of a rank's own costs, in seconds."""

    launch: float = 1.5e-4  # of the rank's own thread, to start and end one small message
    copy: float = 2.5e-10  # a byte, into a bucket
    woke: float = 0.0  # how late the slowest rank wakes
    slow: float = 1.0  # a core's seconds beside other ranks, over those of the profile
    late: float = 0.0  # of a message that is sent beside work, over one by itself


@dataclass(frozen=True, eq=False)
class Setting:
    """Everything a step is foretold from, besides its plan."""

    profile: dict[str, Any]
    prices: Prices | None  # None for one rank
    stretch: float  # wall over core seconds
    threads: Sequence[int] = ()
    host: Host = field(default_factory=Host)
    knobs: Knobs = field(default_factory=Knobs)


def step(plan: Plan, setting: Setting) -> Graph:
    """The step of every rank as one graph."""
    return _Step(plan, setting).made()


class _Step:
    """Puts the tasks of a step in, rank by rank and then what joins them."""

    def __init__(self, plan: Plan, setting: Setting) -> None:
        self.plan, self.setting, self.knobs = plan, setting, setting.knobs
        self.builder, self.ranks = Builder(), range(plan.ranks)
        self.bytes: dict[str, int] = setting.profile["parameters"]
        self.worth = float(max(setting.stretch**self.knobs.stretch, 1.0))
        self.work = [self._lane(f"rank {r}", r, "compute") for r in self.ranks]
        self.send = [
            [self._lane(f"messages {k}", r, "comm") for k in range(MESSAGES)] for r in self.ranks
        ]
        self.cores = [self.builder.link(f"core {r}", 1.0 / self.worth) for r in self.ranks]
        self.wire = self.builder.link("wire", 1.0)
        self.count: dict[str, int] = {}
        self.taken = [0.0] * MESSAGES  # seconds of the messages each thread has been given
        self.is_sending = False  # a message left in the middle of a backward
        self.over = [-1 for _ in self.ranks]  # the last gradient of each rank
        self.last = [-1 for _ in self.ranks]  # the task each rank's work goes on from

    def _lane(self, name: str, rank: int, kind: str) -> int:
        return self.builder.lane(name, rank=rank, kind=kind)

    def made(self) -> Graph:
        ways = _ways(self.plan, self.bytes)
        launched = self._there_and_back(ways)
        sent = [self._message("all_reduce", self._size(b), at) for b, at in launched["buckets"]]
        for layer, at in launched["factors"]:
            sent.append(self._message("all_gather", self._rows(layer), at))
        owned = {n: int(way.partition(":")[2]) for n, way in ways.items() if way[:2] == "ps"}
        if owned:
            each = [self._do(r, "reduce", self._launch(len(owned))) for r in self.ranks]
            sent += [self._message("reduce", self.bytes[n], each) for n in owned]
        self._update(sent, ways, owned)
        if owned:
            each = list(self.last)
            back = [self._message("broadcast", self.bytes[n], each) for n in owned]
            for r in self.ranks:
                self._do(r, "wait", self._woke(back), back)
        return self.builder.graph(plan=str(self.plan), model=self.setting.profile["model"])

    # One rank's own work

    def _pieces(self, rank: int, samples: int) -> Pieces:
        threads = self.setting.threads[rank] if self.setting.threads else 1
        return pieces(self.setting.profile, samples, threads)

    def _do(self, rank: int, name: str, seconds: float, after: Iterable[int] = ()) -> int:
        """A piece of a rank's work, behind the one before it."""
        waits = [*after, *([self.last[rank]] if self.last[rank] >= 0 else [])]
        uses = {self.cores[rank]: 1.0} if seconds > 0 else None
        self.last[rank] = self.builder.task(
            kind="host", op=name.split()[0], name=name, rank=rank, lanes=[self.work[rank]],
            seconds=seconds, after=waits, uses=uses, source="measured",
        )  # fmt: skip
        return self.last[rank]

    def _own(self, seconds: float) -> float:
        """Core seconds here, of a piece that takes so many in the profile."""
        own = self.knobs.models.get(self.setting.profile["model"], 1.0)
        return seconds * self.setting.host.slow * self.knobs.compute * own

    def _launch(self, messages: int) -> float:
        return messages * self.knobs.launch * self.setting.host.launch

    def _woke(self, waited: list[int]) -> float:
        """How late a rank goes on after it has waited; no core is worth more for it."""
        return self.knobs.wake * self.setting.host.woke / self.worth if waited else 0.0

    def _there_and_back(self, ways: dict[str, str]) -> dict[str, list[tuple[Any, list[int]]]]:
        """Forward and backward of every rank; what may be sent, and the tasks it waits for."""
        layout = _layout(self.plan, self.bytes, ways)
        ready: list[dict[str, int]] = []
        for r, samples in enumerate(plans.samples(self.plan, self.setting.profile)):
            many = max(1, samples // self.plan.micro_batch) if self.plan.micro_batch else 1
            found = self._pieces(r, samples // many)
            for k in range(many):
                done = self._pass(r, found, ways, is_last=k + 1 == many)
            ready.append(done)
            self.over[r] = max(done.values())
        late = self.plan.overlap is False
        buckets = []
        at = [-1] * len(ready)
        for bucket in (layout.buckets[k] for k in layout.order):
            for r, done in enumerate(ready):
                behind = [self.last[r]] if late else [done[n] for n in bucket]
                at[r] = max([at[r], *behind])
            buckets.append((bucket, list(at)))
        layers = {n.rpartition(".")[0]: n for n, way in ways.items() if way == "factors"}
        return {
            "buckets": buckets,
            "factors": [(layer, [done[n] for done in ready]) for layer, n in layers.items()],
        }

    def _pass(
        self, rank: int, found: Pieces, ways: dict[str, str], *, is_last: bool
    ) -> dict[str, int]:
        """One micro-batch; the task that leaves each parameter's gradient."""
        self._do(rank, "forward", self._own(found.forward))
        done = {}
        for name, seconds in found.backward:
            kept = 0.5 if ways[name] == "factors" else 1.0  # its product comes before the update
            cost = self._own(seconds * kept)
            if is_last and len(self.ranks) > 1:
                cost += self.bytes[name] * self.knobs.copy * self.setting.host.copy
            done[name] = self._do(rank, f"gradient {name}", cost)
        if found.rest > 0:
            self._do(rank, "rest", self._own(found.rest))
        return done

    # What joins ranks

    def _message(self, op: str, size: float, after: list[int]) -> int:
        """One collective of all ranks, as soon as the last of them has begun it."""
        prices = self.setting.prices
        assert prices is not None
        wire = self.knobs.wire * self.knobs.wires.get(prices.network, 1.0)
        core = prices.core(op, size) * self.worth * self.knobs.interference
        alone = max(prices.seconds(op, size) * wire, core)  # its own rank may be too busy for it
        late = self.setting.host.late * self.knobs.wire if self._is_beside(after) else 0.0
        seconds = alone + late
        share = (prices.share(op, size) * alone + late) / seconds  # others wait for it, too
        number = self.count[op] = self.count.get(op, -1) + 1
        lane = self.taken.index(min(self.taken))  # the thread that is free first takes it
        self.taken[lane] += seconds
        lanes = [self.send[r][lane] for r in self.ranks]
        return self.builder.task(
            kind="collective", op=op, name=f"{op} {number}", rank=0, lanes=lanes, seconds=seconds,
            comm_bytes=size, after=after, uses={self.wire: share}, source="measured",
        )  # fmt: skip

    def _is_beside(self, after: list[int]) -> bool:
        """Whether a rank still computes when a message leaves, or sends one that did so."""
        pairs = list(zip(after, self.over, strict=True))
        if any(begun < over for begun, over in pairs):
            self.is_sending = True
        return self.is_sending and all(begun <= over for begun, over in pairs)

    def _size(self, bucket: Sequence[str]) -> float:
        return float(sum(self.bytes[n] for n in bucket))

    def _rows(self, layer: str) -> float:
        """Bytes that a rank sends of a layer's factors: as many rows as the largest share has."""
        width, out, each = self.setting.profile["linear"][layer]
        most = max(plans.samples(self.plan, self.setting.profile))
        return float(4 * most * each * (width + out))

    def _update(self, sent: list[int], ways: dict[str, str], owned: dict[str, int]) -> None:
        total = sum(self.bytes.values())
        for r, samples in enumerate(plans.samples(self.plan, self.setting.profile)):
            found = self._pieces(r, samples)
            product = sum(s for n, s in found.backward if ways[n] == "factors")
            mine = sum(b for n, b in self.bytes.items() if owned.get(n, r) == r) / total
            start = self._launch(0 if owned else len(sent)) + self._woke(sent)
            again = 0.5 * product * len(self.ranks)
            cost = self._own(found.update * mine + again) + start
            self._do(r, "update", cost, sent)


def _ways(plan: Plan, bytes: dict[str, int]) -> dict[str, str]:
    """How each parameter is kept together."""
    if plan.ranks == 1:
        return dict.fromkeys(bytes, "alone")
    if plan.zero == 1:
        return {n: f"ps:{r}" for n, r in _owners(bytes, plan.dp).items()}
    given = dict(cast(Iterable[tuple[str, str]], plan.sync))
    return {name: given.get(name, "all-reduce") for name in bytes}


def _owners(sizes: dict[str, int], ranks: int) -> dict[str, int]:
    """Each parameter with one rank: the largest first, to the rank that holds least."""
    held = [0] * ranks
    found = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = found[name] = held.index(min(held))
        held[rank] += sizes[name]
    return {name: found[name] for name in sizes}


def _layout(plan: Plan, bytes: dict[str, int], ways: dict[str, str]) -> Layout:
    sizes = {n: b for n, b in bytes.items() if ways[n] == "all-reduce"}
    if not sizes:
        return Layout(())
    if not plan.buckets:
        return by_size(sizes, plan.bucket_mb * 2**20)
    kept = [tuple(n for n in bucket if n in sizes) for bucket in plan.buckets]
    return Layout(tuple(bucket for bucket in kept if bucket))
