"""The graph of a step whose layers are on ranks of their own: prices, order, sends and tasks.

    forward, backward   one task a stretch of layers on the same ranks, rank and micro-batch; the
                        last backward has one for each message of gradients
    send                samples that the next stretch wants elsewhere
    sync, product       gradients as soon as their backward is done; with factors, then the product
    update, share       the optimizer when all gradients are there; then parameters go round

Messages between nodes use the way out of the one and into the other, inside a node its bus, and
share them with collectives; a rank has one lane for its work and one for collectives.
`foretell.search.placement` simulates the same step compiled, thousands of times a second.

In which order each rank takes its runs of layers, there and back, micro-batch by micro-batch.

A step in which every forward takes 1 and every backward 2 is simulated; a rank that may choose
takes a backward, then the earliest micro-batch. All ranks simulate the same step, so that nothing
has to be asked; and since it is a step that could be, no rank waits for ever.

Sends that redistribute a batch which is split one way before and another way behind.

Samples lie in a row; rank i of a set holds the samples from `edges[i]` to `edges[i + 1]`. What a
consumer needs of what a producer holds is where their stretches overlap. `Move` is one stretch; a
rank that has it already moves nothing. `foretell.search.placement.moves` is the
same, compiled, cell by cell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError
from foretell.graph import Builder, Graph
from foretell.graph.groups import group_text
from foretell.plan.layer_ranges import (
    GroupCosts,
    Layer,
    LayerRange,
    gathered,
    layer_ranges,
    update_seconds,
)
from foretell.plan.plan import Plan
from foretell.whatif import Setting, applied, parse
from foretell.workload import Workload

_TAKES = {"F": 1, "B": 2}  # a backward is about twice a forward


class Action(NamedTuple):
    """The forward or backward of one run of layers for one micro-batch."""

    kind: str  # F or B
    run: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.run}{self.kind}{self.micro_batch}"


def orders(
    where: Sequence[Sequence[int]], batches: int, together: Collection[int] = ()
) -> dict[int, list[Action]]:
    """What each rank does, in order; `where` has the ranks of each run of layers.

    Ranks of runs in `together` (the split ones) begin at the same moment: they communicate inside.
    """
    played = _RankActions(where, batches, together)
    now = 0
    played.begin(now)
    while played.busy:
        now = played.busy[0][0]
        played.end(now)
        played.begin(now)
    return played.found


class _RankActions:
    """A step on its way."""

    def __init__(
        self, where: Sequence[Sequence[int]], batches: int, together: Collection[int]
    ) -> None:
        self.where, self.together = where, together
        self.found: dict[int, list[Action]] = {rank: [] for ranks in where for rank in ranks}
        self.idle, self.busy = set(self.found), list[tuple[int, int, Action]]()  # end, rank, what
        self.ready: dict[int, list[tuple[bool, int, int]]] = {rank: [] for rank in self.found}
        self.then, self.missing = (
            dict[Action, list[Action]](),
            dict[Action, int](),
        )  # ends still to come
        acts = [Action(k, q, m) for m in range(batches) for q in range(len(where)) for k in "FB"]
        for act in acts:
            needs = _before(act, len(where))
            for need in needs:
                self.then.setdefault(need, []).append(act)
            self.missing[act] = sum(len(where[need.run]) for need in needs)
            if not needs:
                self._offer(act)

    def _offer(self, act: Action) -> None:
        """Nothing is missing any more: its ranks may take it."""
        for rank in self.where[act.run]:
            self.ready[rank].append((act.kind == "F", act.micro_batch, act.run))

    def begin(self, now: int) -> None:
        """Idle ranks take what comes first."""
        for rank in sorted(self.idle):
            if rank in self.idle:
                chosen = next(filter(self._can_begin, sorted(self.ready[rank])), None)
                if chosen is not None:
                    self._take(chosen, rank, now)

    def _can_begin(self, key: tuple[bool, int, int]) -> bool:
        return key[2] not in self.together or self.idle.issuperset(self.where[key[2]])

    def _take(self, key: tuple[bool, int, int], rank: int, now: int) -> None:
        """Let a rank begin what it chose, and with it all that have to begin at once."""
        is_forward, m, q = key
        act = Action("F" if is_forward else "B", q, m)
        for one in self.where[q] if q in self.together else (rank,):
            self.ready[one].remove(key)
            self.found[one].append(act)
            self.idle.discard(one)
            heappush(self.busy, (now + _TAKES[act.kind], one, act))

    def end(self, now: int) -> None:
        """What is done at this moment frees its rank, and others that waited for it."""
        while self.busy and self.busy[0][0] == now:
            _, rank, act = heappop(self.busy)
            self.idle.add(rank)
            for follower in self.then.get(act, ()):
                self.missing[follower] -= 1
                if not self.missing[follower]:
                    self._offer(follower)


def _before(act: Action, runs: int) -> list[Action]:
    """What has to be done on all its ranks first; micro-batches of a run go in turn."""
    kind, q, m = act
    earlier = [Action(kind, q, m - 1)] if m else []
    if kind == "F":
        return earlier + ([Action("F", q - 1, m)] if q else [])
    return [*earlier, Action("F", q, m)] + ([Action("B", q + 1, m)] if q + 1 < runs else [])


class Move(NamedTuple):
    """Samples `first` to `last` go from one rank to another."""

    source: int
    target: int
    first: int
    last: int


def edges(shares: Sequence[int]) -> list[int]:
    """Where each rank's samples begin and end."""
    return [0, *accumulate(shares)]


def reslice(held: Mapping[int, int], wanted: Mapping[int, int]) -> list[Move]:
    """Moves that turn one split into another; both map ranks to samples, in order."""
    (before, behind), moves = (edges([*d.values()]) for d in (held, wanted)), []
    if before[-1] != behind[-1]:
        raise ValueError(f"{before[-1]} samples are held, {behind[-1]} are wanted")
    for i, source in enumerate(held):
        for j, target in enumerate(wanted):
            first, last = max(before[i], behind[j]), min(before[i + 1], behind[j + 1])
            if first < last:
                moves.append(Move(source, target, first, last))
    return moves


def gather(held: dict[int, int], targets: Sequence[int]) -> list[Move]:
    """Moves after which every target has all samples."""
    bounds = edges([*held.values()])
    return [
        Move(source, target, bounds[i], bounds[i + 1])
        for target in targets
        for i, source in enumerate(held)
        if held[source]
    ]


def handed(
    held: Mapping[int, int], wanted: Mapping[int, int], *, from_all: bool, to_all: bool
) -> list[Move]:
    """Moves between ranks that have a part each or, where layers are split over them, all samples.

    From ranks that hold everything each other rank gets an equal part of all of them.
    """
    if not from_all:
        return gather(dict(held), list(wanted)) if to_all else reslice(held, wanted)
    whole, bounds = next(iter(held.values())), edges([*wanted.values()])
    found = []
    for i, target in enumerate(wanted):
        first, last = (0, whole) if to_all else (bounds[i], bounds[i + 1])
        if target in held:
            found += [Move(target, target, first, last)] if first < last else []
            continue
        cuts = [first + (last - first) * k // len(held) for k in range(len(held) + 1)]
        each = zip(held, pairwise(cuts), strict=True)
        found += [Move(source, target, a, b) for source, (a, b) in each if a < b]
    return found


def rewrite(held: dict[int, int], wanted: dict[int, int] | Sequence[int]) -> list[str]:
    """The tasks between two ops as text: `split`, `copy` and `concat`, those that do something."""
    moves = reslice(held, wanted) if isinstance(wanted, dict) else gather(held, wanted)
    lines = []
    for source in dict.fromkeys(m.source for m in moves):
        out = [m for m in moves if m.source == source]
        if len({m[2:] for m in out}) > 1:
            lines.append(f"split {source}: " + " ".join(f"{m.first}-{m.last}" for m in out))
    lines += [
        f"copy {m.source}→{m.target}: {m.first}-{m.last}" for m in moves if m.source != m.target
    ]
    for target in dict.fromkeys(m.target for m in moves):
        into = [m for m in moves if m.target == target]
        if len(into) > 1:
            lines.append(f"concat {target}: {len(into)} parts")
    return lines


def lower_groups(
    plan: Plan, workload: Workload, cluster: Cluster, costs: GroupCosts | None = None
) -> Graph:
    """The graph of one step of a checked plan."""
    costs = costs or GroupCosts.of(plan, workload, cluster)
    found, batches = layer_ranges(plan, costs)
    for stretch in found:
        if stretch.is_split:
            require_split(stretch, costs)
    context = _Context(plan, costs, found, batches)
    for m in range(batches):
        for q in range(len(found)):
            _forward(context, m, q)
    for m in range(batches):
        for q in reversed(range(len(found))):
            _backward(context, m, q)
    _end(context)
    graph = context.build.made({"workload": workload.name, "plan": str(plan)})
    return applied([parse(text) for text in plan.whatifs], graph, Setting(cluster))


@dataclass
class _Context:
    """A graph on its way."""

    plan: Plan
    costs: GroupCosts
    found: list[LayerRange]
    batches: int
    build: Builder = field(default_factory=Builder)
    done: dict[tuple[int, int], int] = field(default_factory=dict)  # micro-batch, rank: its newest
    synced: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # by rank
    later: list[tuple[LayerRange, str, float]] = field(
        default_factory=list
    )  # goes round at the end
    last: dict[int, int] = field(default_factory=dict)  # the last backward of each rank

    def __post_init__(self) -> None:
        self.ranks = sorted({rank for stretch in self.found for rank in stretch.ranks})
        self.flying = in_flight(self.found)
        self.work, self.talk = self._lanes("compute", "compute"), self._lanes("collectives", "comm")
        nodes = sorted({self.node(rank) for rank in self.ranks})
        self.wires = {
            (word, n): self.build.link(f"{word} {n}", 1.0)
            for n in nodes
            for word in ("out", "in", "bus")
        }

    def _lanes(self, name: str, kind: str) -> dict[int, int]:
        return {r: self.build.lane(name, rank=r, kind=kind, ordered=False) for r in self.ranks}

    def node(self, rank: int) -> int:
        """The machine of a rank."""
        return int(self.costs.cluster.nodes[rank])


def _forward(context: _Context, m: int, q: int) -> None:
    """One stretch of one micro-batch, and what it is passed."""
    stretch = context.found[q]
    arrived = _boundary_messages(context, m, q - 1, back=False) if q else {}
    before = {r: context.done.get((m, r)) for r in stretch.ranks}
    if q:
        _forget(context, m)
    for rank in stretch.ranks:
        context.done[m, rank] = _kernel(
            context, rank, "forward", stretch.seconds(context.costs, rank)[0], m,
            [before[rank], *arrived.get(rank, ())], priority=1,
        )  # fmt: skip


def _forget(context: _Context, m: int) -> None:
    """What was sent on is behind: only the newest stretch of a micro-batch is waited for."""
    for key in [key for key in context.done if key[0] == m]:
        del context.done[key]


def _kernel(
    context: _Context, rank: int, op: str, seconds: float, m: int, after: Iterable[int | None],
    priority: int = 0,
) -> int:  # fmt: skip
    phases = {"forward": "forward", "optimizer": "update"}
    return context.build.task(
        lane=context.work[rank], after=[a for a in after if a is not None], kind="kernel", op=op,
        name=op, rank=rank, seconds=seconds, phase=phases.get(op, "backward"), micro_batch=m,
        priority=priority, source="formula",
    )  # fmt: skip


def _boundary_messages(context: _Context, m: int, q: int, *, back: bool) -> dict[int, list[int]]:
    """Messages between a stretch and the next, and for each rank those it waits for."""
    first, then = context.found[q], context.found[q + 1]
    size = float(context.costs.held["handed"][first.units[-1]]) * first.batch / context.batches
    found: dict[int, list[int]] = defaultdict(list)
    for (source, target), share in moved(first, then).items():
        here, there = (target, source) if back else (source, target)
        found[there].append(_send(context, here, there, share * size, m))
    return found


def moved(first: LayerRange, then: LayerRange) -> dict[tuple[int, int], float]:
    """What share of the batch goes from rank to rank; a split stretch has all samples everywhere.

    From ranks that hold everything each other rank gets its part of all of them alike.
    """
    out: dict[tuple[int, int], float] = defaultdict(float)
    if first.is_split:
        for target in [r for r in then.ranks if r not in first.ranks]:
            part = 1.0 if then.is_split else then.samples[target] / then.batch
            for source in first.ranks:
                out[source, target] += part / len(first.ranks)
    elif then.is_split:
        for source, target in ((a, b) for a in first.ranks for b in then.ranks if a != b):
            out[source, target] += first.samples[source] / first.batch
    else:
        for move in reslice(first.samples, then.samples):
            if move.source != move.target:
                out[move.source, move.target] += (move.last - move.first) / first.batch
    return out


def _send(context: _Context, here: int, there: int, size: float, m: int) -> int:
    apart = context.node(here) != context.node(there)
    wires = [("out", here), ("in", there)] if apart else [("bus", here)]
    after = context.done.get((m, here))
    return context.build.task(
        after=[] if after is None else [after], kind="send", op="send", rank=there,
        seconds=context.costs.talk("send", size, (here, there)), comm_bytes=size,
        phase="communicate", micro_batch=m, group=group_text((here, there)), source="formula",
        uses={context.wires[word, context.node(rank)]: 1.0 for word, rank in wires},
    )  # fmt: skip


def _backward(context: _Context, m: int, q: int) -> None:
    """One stretch backward, message by message in the last micro-batch."""
    stretch, is_last = context.found[q], m + 1 == context.batches
    arrived: dict[int, list[int]] = {}
    before = {r: context.done.get((m, r)) for r in stretch.ranks}
    if q + 1 < len(context.found):
        arrived = _boundary_messages(context, m, q, back=True)
        _forget(context, m)
    sends = is_last and len(stretch.ranks) > 1 and not stretch.is_split
    fuse = context.plan.bucket_mb * 2**20
    pieces = stretch.messages(context.costs, fuse) if sends else [stretch.layers]
    for piece in pieces:
        for rank in stretch.ranks:
            after = [before[rank], *arrived.get(rank, ())]
            seconds = stretch.backward(context.costs, rank, piece, by_factors=sends)
            task = _kernel(context, rank, "backward", seconds, m, after, priority=2)
            context.done[m, rank] = context.last[rank] = task
        before, arrived = {r: context.done[m, r] for r in stretch.ranks}, {}
        if sends and context.plan.overlap is not False:
            _sync(context, stretch, piece, m)
    for piece in pieces if sends and context.plan.overlap is False else ():
        _sync(context, stretch, piece, m)


def _sync(context: _Context, stretch: LayerRange, piece: Sequence[Layer], m: int) -> None:
    """One message of gradients; with factors, the matmul that follows it."""
    costs, ranks = context.costs, stretch.ranks
    size = costs.gradient([layer.unit for layer in piece])
    if not size:
        return
    way, sent = piece[0].way, piece[0].factors
    ops = {"ps": "reduce", "sharded": "reduce_scatter"}
    seconds = costs.talk(ops.get(way, "all_reduce"), size, ranks)
    if sent:
        rows, width = stretch.rows, costs.widths[1]
        rest = size - sum(p.elements for p in sent) * width
        factors = rows * gathered(sent) * width
        seconds = costs.talk("all_gather", factors, ranks) + costs.talk("all_reduce", rest, ranks)
        size = factors + rest
    task = _collective(context, stretch, ops.get(way, "all_reduce"), size, seconds,
                       [context.done[m, r] for r in ranks])  # fmt: skip
    for rank in ranks:
        behind = task
        if sent:
            device = costs.cluster.devices[rank]
            took = sum(costs.product_seconds(device, p, stretch.rows) for p in sent)
            behind = _kernel(context, rank, "product", took, m, [task])
        context.synced[rank].append(behind)
    if way in ("ps", "sharded"):
        context.later.append((stretch, "broadcast" if way == "ps" else "all_gather", size))


def _collective(
    context: _Context, stretch: LayerRange, op: str, size: float, seconds: float, after: list[int]
) -> int:
    """A collective of all ranks of a stretch: one at a time on each."""
    nodes = dict.fromkeys(context.node(rank) for rank in stretch.ranks)
    words = ("out", "in") if len(nodes) > 1 else ("bus",)
    return context.build.task(
        lanes=[context.talk[r] for r in stretch.ranks], after=after, kind="collective", op=op,
        name=op, rank=stretch.ranks[0], seconds=seconds, comm_bytes=size, phase="communicate",
        group=group_text(stretch.ranks), source="formula",
        uses={context.wires[word, node]: 1.0 for node in nodes for word in words},
    )  # fmt: skip


def _end(context: _Context) -> None:
    """The optimizer of each rank when all is there; then parameters that others updated."""
    updated = {}
    for rank in context.ranks:
        took = update_seconds(context.found, context.costs, rank)
        newest = [
            context.done[m, rank] for m in range(context.batches) if (m, rank) in context.done
        ]
        after = {context.last[rank], *newest, *context.synced[rank]}
        updated[rank] = _kernel(context, rank, "optimizer", took, 0, sorted(after))
        _hold(context, rank)
    for stretch, op, size in context.later:
        seconds = context.costs.talk(op, size, stretch.ranks)
        _collective(context, stretch, op, size, seconds, [updated[r] for r in stretch.ranks])


def _hold(context: _Context, rank: int) -> None:
    """What a rank has all the time, and what its backwards need."""
    for kind, size in holding(context.found, context.costs, rank, context.flying).items():
        word = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer"}
        context.build.buffer(size, rank=rank, name=kind, kind=word.get(kind, "activation"))


def in_flight(found: Sequence[LayerRange]) -> dict[tuple[int, int], int]:
    """For each rank and stretch the most micro-batches whose backward is still to come."""
    split = [q for q, stretch in enumerate(found) if stretch.is_split]
    out: dict[tuple[int, int], int] = {}
    for rank, row in orders([one.ranks for one in found], found[0].batches, split).items():
        now = dict.fromkeys(range(len(found)), 0)
        for act in row:
            now[act.run] += 1 if act.kind == "F" else -1
            out[rank, act.run] = max(out.get((rank, act.run), 0), now[act.run])
    return out


def holding(
    found: Sequence[LayerRange], costs: GroupCosts, rank: int, flying: Mapping[tuple[int, int], int]
) -> dict[str, float]:
    """Bytes of a rank at its fullest, by what they are."""
    total = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "activations": 0.0}
    brief = 0.0
    for q, stretch in enumerate(found):
        if rank in stretch.ranks:
            parts, moment = stretch.holds(costs, rank, flying[rank, q])
            total = {key: total[key] + parts[key] for key in total}
            brief = max(brief, moment)
    return total | {"buffers": brief}


def require_split(stretch: LayerRange, costs: GroupCosts) -> None:
    """Raise where a stretch cannot be split over its ranks."""
    most = costs.workload.most(*costs.degrees(2))
    nodes = {int(costs.cluster.nodes[rank]) for rank in stretch.ranks}
    if len(nodes) > 1 or len(stretch.ranks) > most:
        raise InfeasibleError(
            f"`{stretch.layers[0].name}` is split over ranks {group_text(stretch.ranks)}",
            hint=f"a split stays inside one node and has at most {most:g} ranks",
        )
