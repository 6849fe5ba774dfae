"""The graph of a step under a plan, from one rank by itself and what links and cores cost.

Every rank has a lane for its own work and two for messages (gloo works on two at once). Work uses
the rank's share of a core, a link of the graph like any other: a busy machine is one whose cores
are worth less. Messages share one wire, also those that go opposite ways: between two ranks gloo
has one connection, in which a short message waits behind a long one and holds a thread meanwhile,
so that in measured steps they take turns. Messages that meet stall (→ host.py); which do is found
by simulating the step until no others meet.
What is sent when is what `foretell.pytorch.deploy` does:

    all-reduce   buckets in order, each as soon as its gradients and all buckets before it are there
    factors      [x | g] of a layer gathered from its backward on, by threads of its own, and
                 multiplied one after another when all buckets are there
    ps, sharded  reduced to their owner after the backward, sent back after its update
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretell.graph import Builder, Graph, Kind
from foretell.plan import Plan
from foretell.simulate import simulate
from foretell_lab.emulation import plans
from foretell_lab.emulation.host import Host
from foretell_lab.emulation.pieces import Pieces, pieces
from foretell_lab.emulation.prices import Prices
from foretell_lab.emulation.sync_methods import layout_of, ways_of

EXCHANGES = ("all_reduce", "all_gather")  # every rank sends and waits for what it gets
_TURNS = 4  # at most: messages that stall meet more of the others
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


@dataclass(frozen=True, eq=False)
class Setting:
    """Everything a step is predicted from, besides its plan."""

    profile: dict[str, Any]
    prices: Prices | None  # None for one rank
    stretch: float  # wall over core seconds
    threads: Sequence[int] = ()
    host: Host = field(default_factory=Host)
    knobs: Knobs = field(default_factory=Knobs)


def step(plan: Plan, setting: Setting) -> Graph:
    """The step of every rank as one graph."""
    met: frozenset[str] = frozenset()
    made = _Step(plan, setting, met).made()
    for _ in range(_TURNS if setting.host.stall else 0):
        more = met | _meeting(made)
        if more == met:
            break
        met, made = more, _Step(plan, setting, more).made()
    return made


def _meeting(made: Graph) -> frozenset[str]:
    """The exchanges that are under way while another is."""
    played = simulate(made)
    every = np.flatnonzero(made.kind == Kind.COLLECTIVE).tolist()
    sent = [int(k) for k in every if made[k].op in EXCHANGES]
    sent.sort(key=lambda k: float(played.start[k]))
    found, last = set[str](), -1
    for k in sent:
        if last >= 0 and played.start[k] < played.end[last]:
            found |= {made[last].name, made[k].name}
        if last < 0 or played.end[k] > played.end[last]:
            last = k
    return frozenset(found)


class _Step:
    """Puts the tasks of a step in, rank by rank and then what joins them."""

    def __init__(self, plan: Plan, setting: Setting, met: frozenset[str]) -> None:
        self.plan, self.setting, self.knobs, self.met = plan, setting, setting.knobs, met
        self.builder, self.ranks = Builder(), range(plan.ranks)
        self.bytes: dict[str, int] = setting.profile["parameters"]
        self.worth = float(max(setting.stretch**self.knobs.stretch, 1.0))
        self.work = [self._lane(f"rank {r}", r, "compute") for r in self.ranks]
        self.send = {group: self._threads(group) for group in ("messages", "factors")}
        self.cores = [self.builder.link(f"core {r}", 1.0 / self.worth) for r in self.ranks]
        self.wire = self.builder.link("wire", 1.0)
        self.count: dict[str, int] = {}
        self.taken = {group: [0.0] * MESSAGES for group in self.send}  # seconds, of each thread
        self.last = [-1 for _ in self.ranks]  # the task each rank's work goes on from

    def _lane(self, name: str, rank: int, kind: str) -> int:
        return self.builder.lane(name, rank=rank, kind=kind)

    def _threads(self, group: str) -> list[list[int]]:
        """A lane for each of the threads that send for a group of ranks, rank by rank."""
        return [
            [self._lane(f"{group} {k}", r, "comm") for k in range(MESSAGES)] for r in self.ranks
        ]

    def made(self) -> Graph:
        ways = ways_of(self.plan, self.bytes)
        launched = self._there_and_back(ways)
        sent = [self._message("all_reduce", self._size(b), at) for b, at in launched["buckets"]]
        rows = {
            layer: self._message("all_gather", self._rows(layer), at)
            for layer, at in launched["factors"]
        }
        self._multiply(rows, sent)
        sent += rows.values()
        owned = {n: int(way.partition(":")[2]) for n, way in ways.items() if way[:2] == "ps"}
        if owned:
            each = [self._do(r, "reduce", self._launch(len(owned))) for r in self.ranks]
            sent += [self._message("reduce", self.bytes[n], each) for n in owned]
        self._update(sent, owned)
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
        layout = layout_of(self.plan, self.bytes, ways)
        ready: list[dict[str, int]] = []
        for r, samples in enumerate(plans.samples(self.plan, self.setting.profile)):
            many = max(1, samples // self.plan.micro_batch) if self.plan.micro_batch else 1
            found = self._pieces(r, samples // many)
            for k in range(many):
                done = self._pass(r, found, ways, is_first=k == 0, is_last=k + 1 == many)
            ready.append(done)
        late = self.plan.overlap is False
        buckets = []
        at = [-1] * len(ready)
        for bucket in layout.buckets:
            for r, done in enumerate(ready):
                behind = [self.last[r]] if late else [done[n] for n in bucket]
                at[r] = max([at[r], *behind])
            buckets.append((bucket, list(at)))
        layers = {_layer(n): n for n in ready[0] if ways[n] == "factors"}  # as they become ready
        return {
            "buckets": buckets,
            "factors": [(layer, [done[n] for done in ready]) for layer, n in layers.items()],
        }

    def _pass(
        self, rank: int, found: Pieces, ways: dict[str, str], *, is_first: bool, is_last: bool
    ) -> dict[str, int]:
        """One micro-batch; the task that leaves each parameter's gradient."""
        self._do(rank, "forward", self._own(found.forward))
        done: dict[str, int] = {}
        leaving = self._leaving(ways) if is_last else []
        for name, seconds in found.backward:
            sent = any(names <= done.keys() for names in leaving)
            if ways[name] == "factors" and not _begun(name, done):
                packing, product = self._factors(_layer(name), found)
                seconds = max(seconds - product, 0.0) + packing  # the product comes later
            cost = self._own(seconds) * (self.setting.host.beside if sent else 1.0)
            cost += (not is_first) * self._copied(name) + is_last * self._taken(name, ways[name])
            done[name] = self._do(rank, f"gradient {name}", cost)
        if found.rest > 0:
            self._do(rank, "rest", self._own(found.rest))
        return done

    def _leaving(self, ways: dict[str, str]) -> list[set[str]]:
        """Gradients that make a message each, which leaves in the middle of a backward."""
        alone = [{name} for name, way in ways.items() if way == "factors"]
        layout = layout_of(self.plan, self.bytes, ways)
        if self.plan.overlap is False or not layout.buckets:
            return alone
        return [*alone, set(layout.buckets[0])]  # others leave behind it

    def _copied(self, name: str) -> float:
        """Core seconds to add or copy a gradient to another."""
        return self.bytes[name] * self.knobs.copy * self.setting.host.copy

    def _taken(self, name: str, way: str) -> float:
        """Core seconds to make a gradient ready to be sent."""
        hook = self.knobs.launch * self.setting.host.hook if way == "all-reduce" else 0.0
        return hook + self._copied(name) if len(self.ranks) > 1 else 0.0

    # What joins ranks

    def _message(self, op: str, size: float, after: list[int]) -> int:
        """One collective of all ranks, as soon as the last of them has begun it."""
        prices = self.setting.prices
        assert prices is not None
        wire = self.knobs.wire * self.knobs.wires.get(prices.network, 1.0)
        core = prices.core(op, size) * self.worth * self.knobs.interference
        alone = max(prices.seconds(op, size) * wire, core)  # its own rank may be too busy for it
        number = self.count[op] = self.count.get(op, -1) + 1
        seconds = alone
        if f"{op} {number}" in self.met:
            seconds += self.setting.host.stall * self.worth * self.knobs.wire
        share = prices.share(op, size) * alone / seconds
        group = "factors" if op == "all_gather" else "messages"
        taken = self.taken[group]
        lane = taken.index(min(taken))  # the thread that is free first takes it
        taken[lane] += seconds
        lanes = [threads[lane] for threads in self.send[group]]
        return self.builder.task(
            kind="collective", op=op, name=f"{op} {number}", rank=0, lanes=lanes, seconds=seconds,
            comm_bytes=size, after=after, uses={self.wire: share}, source="measured",
        )  # fmt: skip

    def _size(self, bucket: Sequence[str]) -> float:
        return float(sum(self.bytes[n] for n in bucket))

    def _rows(self, layer: str) -> float:
        """Bytes that a rank sends of a layer's factors: as many rows as the largest share has."""
        width, out, each = self.setting.profile["linear"][layer]
        most = max(plans.samples(self.plan, self.setting.profile))
        return float(4 * most * each * (width + out))

    def _factors(self, layer: str, found: Pieces) -> tuple[float, float]:
        """Core seconds to pack a layer's factors of some samples, and to multiply them."""
        clocked = self.setting.profile.get("factors", {}).get(layer)
        if clocked is None:  # profiles of before: a backward is two matmuls
            return 0.0, 0.5 * sum(s for n, s in found.backward if _layer(n) == layer)
        rows = found.samples * self.setting.profile["linear"][layer][2]
        return rows * clocked[0], rows * clocked[1]

    def _multiply(self, rows: dict[str, int], sent: list[int]) -> None:
        """Gradients of all ranks' factors, padded to the longest; behind the buckets."""
        most = max(plans.samples(self.plan, self.setting.profile))
        for layer, gathered in rows.items():
            for r in self.ranks:
                _, product = self._factors(layer, self._pieces(r, most))
                cost = self._own(product * len(self.ranks))
                self._do(r, f"product {layer}", cost, [gathered, *sent])

    def _update(self, sent: list[int], owned: dict[str, int]) -> None:
        total = sum(self.bytes.values())
        for r, samples in enumerate(plans.samples(self.plan, self.setting.profile)):
            found = self._pieces(r, samples)
            mine = sum(b for n, b in self.bytes.items() if owned.get(n, r) == r) / total
            start = self._launch(0 if owned else len(sent)) + self._woke(sent)
            cost = self._own(found.update * mine) + start + self._waited(sent, mine * total)
            self._do(r, "update", cost, sent)

    def _waited(self, sent: list[int], size: float) -> float:
        """Core seconds more for an update that had to wait, of gradients from elsewhere."""
        host, knobs = self.setting.host, self.knobs
        return knobs.launch * host.wait + knobs.copy * host.cold * size if sent else 0.0


def _layer(name: str) -> str:
    """The layer that a parameter is of."""
    return name.rpartition(".")[0]


def _begun(name: str, done: Iterable[str]) -> bool:
    """Whether another parameter of the layer has its gradient."""
    return any(_layer(other) == _layer(name) for other in done)
