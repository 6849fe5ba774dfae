"""The graph of a step whose layers are on ranks of their own, ready to be simulated.

    forward, backward   one task a stretch of layers on the same ranks, rank and micro-batch; the
                        last backward has one for each message of gradients
    send                samples that the next stretch wants elsewhere (→ foretell.plan.reslice)
    sync, product       gradients as soon as their backward is done; with factors, then the product
    update, share       the optimizer when all gradients are there; then parameters go round

Messages between nodes use the way out of the one and into the other, inside a node its bus, and
share them with collectives; a rank has one lane for its work and one for collectives.
`foretell.search.placement` simulates the same step compiled, thousands of times a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError
from foretell.graph import Builder, Graph
from foretell.graph.groups import group_text
from foretell.plan.group_costs import GroupCosts
from foretell.plan.group_order import orders
from foretell.plan.group_rows import Layer, Stretch, stretches
from foretell.plan.plan import Plan
from foretell.plan.reslice import reslice
from foretell.whatif import Setting, applied, parse
from foretell.workload import Workload


def lower_groups(
    plan: Plan, workload: Workload, cluster: Cluster, costs: GroupCosts | None = None
) -> Graph:
    """The graph of one step of a checked plan."""
    costs = costs or GroupCosts.of(plan, workload, cluster)
    found, batches = stretches(plan, costs)
    for stretch in found:
        if stretch.is_split:
            require_split(stretch, costs)
    sheet = _Sheet(plan, costs, found, batches)
    for m in range(batches):
        for q in range(len(found)):
            _forward(sheet, m, q)
    for m in range(batches):
        for q in reversed(range(len(found))):
            _backward(sheet, m, q)
    _end(sheet)
    graph = sheet.build.made({"workload": workload.name, "plan": str(plan)})
    return applied([parse(text) for text in plan.whatifs], graph, Setting(cluster))


@dataclass
class _Sheet:
    """A graph on its way."""

    plan: Plan
    costs: GroupCosts
    found: list[Stretch]
    batches: int
    build: Builder = field(default_factory=Builder)
    done: dict[tuple[int, int], int] = field(default_factory=dict)  # micro-batch, rank: its newest
    synced: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # by rank
    later: list[tuple[Stretch, str, float]] = field(default_factory=list)  # goes round at the end
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


def _forward(sheet: _Sheet, m: int, q: int) -> None:
    """One stretch of one micro-batch, and what it is passed."""
    stretch = sheet.found[q]
    arrived = _handed(sheet, m, q - 1, back=False) if q else {}
    before = {r: sheet.done.get((m, r)) for r in stretch.ranks}
    if q:
        _forget(sheet, m)
    for rank in stretch.ranks:
        sheet.done[m, rank] = _kernel(
            sheet, rank, "forward", stretch.seconds(sheet.costs, rank)[0], m,
            [before[rank], *arrived.get(rank, ())], priority=1,
        )  # fmt: skip


def _forget(sheet: _Sheet, m: int) -> None:
    """What was sent on is behind: only the newest stretch of a micro-batch is waited for."""
    for key in [key for key in sheet.done if key[0] == m]:
        del sheet.done[key]


def _kernel(
    sheet: _Sheet, rank: int, op: str, seconds: float, m: int, after: Iterable[int | None],
    priority: int = 0,
) -> int:  # fmt: skip
    phases = {"forward": "forward", "optimizer": "update"}
    return sheet.build.task(
        lane=sheet.work[rank], after=[a for a in after if a is not None], kind="kernel", op=op,
        name=op, rank=rank, seconds=seconds, phase=phases.get(op, "backward"), micro_batch=m,
        priority=priority, source="formula",
    )  # fmt: skip


def _handed(sheet: _Sheet, m: int, q: int, *, back: bool) -> dict[int, list[int]]:
    """Messages between a stretch and the next, and for each rank those it waits for."""
    first, then = sheet.found[q], sheet.found[q + 1]
    size = float(sheet.costs.held["handed"][first.units[-1]]) * first.batch / sheet.batches
    found: dict[int, list[int]] = defaultdict(list)
    for (source, target), share in moved(first, then).items():
        here, there = (target, source) if back else (source, target)
        found[there].append(_send(sheet, here, there, share * size, m))
    return found


def moved(first: Stretch, then: Stretch) -> dict[tuple[int, int], float]:
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


def _send(sheet: _Sheet, here: int, there: int, size: float, m: int) -> int:
    apart = sheet.node(here) != sheet.node(there)
    wires = [("out", here), ("in", there)] if apart else [("bus", here)]
    after = sheet.done.get((m, here))
    return sheet.build.task(
        after=[] if after is None else [after], kind="send", op="send", rank=there,
        seconds=sheet.costs.talk("send", size, (here, there)), comm_bytes=size,
        phase="communicate", micro_batch=m, group=group_text((here, there)), source="formula",
        uses={sheet.wires[word, sheet.node(rank)]: 1.0 for word, rank in wires},
    )  # fmt: skip


def _backward(sheet: _Sheet, m: int, q: int) -> None:
    """One stretch backward, message by message in the last micro-batch."""
    stretch, is_last = sheet.found[q], m + 1 == sheet.batches
    arrived: dict[int, list[int]] = {}
    before = {r: sheet.done.get((m, r)) for r in stretch.ranks}
    if q + 1 < len(sheet.found):
        arrived = _handed(sheet, m, q, back=True)
        _forget(sheet, m)
    sends = is_last and len(stretch.ranks) > 1 and not stretch.is_split
    fuse = sheet.plan.bucket_mb * 2**20
    pieces = stretch.messages(sheet.costs, fuse) if sends else [stretch.layers]
    for piece in pieces:
        for rank in stretch.ranks:
            after = [before[rank], *arrived.get(rank, ())]
            seconds = stretch.backward(sheet.costs, rank, piece, by_factors=sends)
            task = _kernel(sheet, rank, "backward", seconds, m, after, priority=2)
            sheet.done[m, rank] = sheet.last[rank] = task
        before, arrived = {r: sheet.done[m, r] for r in stretch.ranks}, {}
        if sends and sheet.plan.overlap is not False:
            _sync(sheet, stretch, piece, m)
    for piece in pieces if sends and sheet.plan.overlap is False else ():
        _sync(sheet, stretch, piece, m)


def _sync(sheet: _Sheet, stretch: Stretch, piece: Sequence[Layer], m: int) -> None:
    """One message of gradients; with factors, the matmul that follows it."""
    costs, ranks = sheet.costs, stretch.ranks
    size = costs.gradient([layer.unit for layer in piece])
    if not size:
        return
    way, sent = piece[0].way, piece[0].factors
    ops = {"ps": "reduce", "sharded": "reduce_scatter"}
    seconds = costs.talk(ops.get(way, "all_reduce"), size, ranks)
    if sent:
        rows, width = stretch.rows, costs.widths[1]
        rest = size - sum(p.elements for p in sent) * width
        factors = sum(rows * p.rows * (p.n1 + p.n2) * width for p in sent)
        seconds = costs.talk("all_gather", factors, ranks) + costs.talk("all_reduce", rest, ranks)
        size = factors + rest
    task = _collective(sheet, stretch, ops.get(way, "all_reduce"), size, seconds,
                       [sheet.done[m, r] for r in ranks])  # fmt: skip
    for rank in ranks:
        behind = task
        if sent:
            device = costs.cluster.devices[rank]
            took = sum(costs.product_seconds(device, p, stretch.rows) for p in sent)
            behind = _kernel(sheet, rank, "product", took, m, [task])
        sheet.synced[rank].append(behind)
    if way in ("ps", "sharded"):
        sheet.later.append((stretch, "broadcast" if way == "ps" else "all_gather", size))


def _collective(
    sheet: _Sheet, stretch: Stretch, op: str, size: float, seconds: float, after: list[int]
) -> int:
    """A collective of all ranks of a stretch: one at a time on each."""
    nodes = dict.fromkeys(sheet.node(rank) for rank in stretch.ranks)
    words = ("out", "in") if len(nodes) > 1 else ("bus",)
    return sheet.build.task(
        lanes=[sheet.talk[r] for r in stretch.ranks], after=after, kind="collective", op=op,
        name=op, rank=stretch.ranks[0], seconds=seconds, comm_bytes=size, phase="communicate",
        group=group_text(stretch.ranks), source="formula",
        uses={sheet.wires[word, node]: 1.0 for node in nodes for word in words},
    )  # fmt: skip


def _end(sheet: _Sheet) -> None:
    """The optimizer of each rank when all is there; then parameters that others updated."""
    updated = {}
    for rank in sheet.ranks:
        took = sum(stretch.update(sheet.costs, rank) for stretch in sheet.found)
        newest = [sheet.done[m, rank] for m in range(sheet.batches) if (m, rank) in sheet.done]
        after = {sheet.last[rank], *newest, *sheet.synced[rank]}
        updated[rank] = _kernel(sheet, rank, "optimizer", took, 0, sorted(after))
        _hold(sheet, rank)
    for stretch, op, size in sheet.later:
        seconds = sheet.costs.talk(op, size, stretch.ranks)
        _collective(sheet, stretch, op, size, seconds, [updated[r] for r in stretch.ranks])


def _hold(sheet: _Sheet, rank: int) -> None:
    """What a rank has all the time, and what its backwards need."""
    for kind, size in holding(sheet.found, sheet.costs, rank, sheet.flying).items():
        word = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer"}
        sheet.build.buffer(size, rank=rank, name=kind, kind=word.get(kind, "activation"))


def in_flight(found: Sequence[Stretch]) -> dict[tuple[int, int], int]:
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
    found: Sequence[Stretch], costs: GroupCosts, rank: int, flying: Mapping[tuple[int, int], int]
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


def require_split(stretch: Stretch, costs: GroupCosts) -> None:
    """Raise where a stretch cannot be split over its ranks."""
    most = costs.workload.most(*costs.degrees(2))
    nodes = {int(costs.cluster.nodes[rank]) for rank in stretch.ranks}
    if len(nodes) > 1 or len(stretch.ranks) > most:
        raise InfeasibleError(
            f"`{stretch.layers[0].name}` is split over ranks {group_text(stretch.ranks)}",
            hint=f"a split stays inside one node and has at most {most:g} ranks",
        )
