"""Layers on ranks of their own: what the rows of a plan's `groups` say, read and checked.

A row is a run of layers in the order of forward: its first and last layer, how its replicas agree,
and `rank:samples` of each, in the order in which ranks hold stretches of the batch:

    conv1 conv5 all-reduce 0:12 1:12 2:8 / fc1 fc3 factors 0:16 1:16

`micro_batch` counts samples of all ranks of a run together. A rank has its samples spread over the
micro-batches as evenly as whole samples allow (→ `dealt`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from foretell.errors import InputError, unknown
from foretell.plan.plan import Plan
from foretell.workload import Workload

AGREED = ("all-reduce", "ps", "sharded", "factors")
WAYS = (*AGREED, "split")


@dataclass(frozen=True)
class Run:
    """Layers in a row on some ranks."""

    first: str
    last: str
    way: str  # of `WAYS`
    samples: Mapping[int, int]  # of each rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who runs it, in the order of their samples."""
        return tuple(self.samples)

    @property
    def batch(self) -> int:
        """Samples of all ranks; where it is split each has all of them."""
        each = [*self.samples.values()]
        return each[0] if self.way == "split" and len(set(each)) == 1 else sum(each)


def runs(plan: Plan) -> tuple[Run, ...]:
    """The rows of a plan's `groups`; raises where they cannot be."""
    found = tuple(_run(row) for row in plan.groups)
    batch = plan.global_batch or found[0].batch
    for run in found:
        each = set(run.samples.values()) if run.way == "split" else {run.batch}
        if each != {batch}:
            has = " and ".join(map(str, sorted(each)))
            raise InputError(
                f"`{run.first}` to `{run.last}` has {has} samples; the batch has {batch}",
                hint="the samples of a row add up to global_batch; `split` names it for each rank",
            )
    return found


def _run(row: tuple[str, ...]) -> Run:
    where = f"the row `{'+'.join(row)}` of groups"
    if len(row) < 4:
        raise InputError(
            f"{where} has {len(row)} parts", hint="write FIRST+LAST+WAY+RANK:SAMPLES+…"
        )
    if row[2] not in WAYS:
        raise unknown(f"way in {where}", row[2], WAYS)
    pairs = [item.partition(":") for item in row[3:]]
    good = [(int(a), int(b)) for a, _, b in pairs if a.isdecimal() and b.isdecimal() and int(b)]
    if len(good) < len(pairs) or len(dict(good)) < len(pairs):
        raise InputError(
            f"{where} does not deal samples out",
            hint="name each rank once, with one sample or more: 0:12+1:4",
        )
    return Run(row[0], row[1], row[2], dict(good))


def as_degrees(plan: Plan, found: Sequence[Run], axis: str, size: int) -> Plan | None:
    """The same plan in degrees where all ranks of a cluster run all layers alike, else None.

    `axis` is the degree that layers split over several ranks have.
    """
    first, ranks = found[0], len(found[0].samples)
    alike = all(run.samples == first.samples and run.way == first.way for run in found)
    even = len(set(first.samples.values())) == 1 and first.ranks == tuple(range(size))
    if not (alike and even) or plan.sync or first.way not in ("all-reduce", "sharded", "split"):
        return None
    micro = plan.micro_batch or first.batch
    bare = plan.but(groups=(), global_batch=first.batch)
    if first.way == "split":
        return bare.but(**{axis: ranks}, micro_batch=micro) if first.batch % micro == 0 else None
    if micro % ranks or first.batch % micro:
        return None
    zero = 1 if first.way == "sharded" else 0
    return bare.but(dp=ranks, zero=zero, micro_batch=micro // ranks)


def agreed(plan: Plan) -> dict[str, str]:
    """How single parameters agree, by the names the plan has for them."""
    for row in plan.sync:
        if len(row) != 2 or row[1].partition(":")[0] not in AGREED:
            raise InputError(
                f"`{'+'.join(row)}` in the plan's sync is not a parameter and a way",
                hint="write NAME+WAY, of all-reduce, ps:RANK, sharded, factors; `/` is %2F in NAME",
            )
    return {row[0]: row[1] for row in plan.sync}


def layers_of(found: Sequence[Run], names: Sequence[str], model: str) -> list[range]:
    """Places in `names` that each run covers; together they are all of them, once, in order."""
    at = {name: i for i, name in enumerate(names)}
    out, behind = [], 0
    for run in found:
        if run.first not in at or run.last not in at:
            raise InputError(
                f"the plan's layers `{run.first}` to `{run.last}` are not in `{model}`",
                hint="it was made for another model: find one for this model",
            )
        if at[run.first] != behind or at[run.last] < behind:
            raise InputError(
                f"the plan's layers go on with `{run.first}` to `{run.last}`; "
                f"`{model}` goes on with `{names[min(behind, len(names) - 1)]}`",
                hint="rows name every layer once, in the order of forward",
            )
        behind = at[run.last] + 1
        out.append(range(at[run.first], behind))
    if behind < len(names):
        raise InputError(
            f"the plan has no ranks for `{names[behind]}` of `{model}`",
            hint="rows name every layer once, in the order of forward",
        )
    return out


def micro_batches(plan: Plan) -> int:
    """How many micro-batches a step has."""
    batch = plan.global_batch or runs(plan)[0].batch
    return -(-batch // plan.micro_batch) if plan.micro_batch else 1


def dealt_run(run: Run, batches: int) -> list[dict[int, int]]:
    """Samples of each rank of a run in each micro-batch; all of them where it is split."""
    if run.way != "split":
        return dealt(run.samples, batches)
    bounds = [m * run.batch // batches for m in range(batches + 1)]
    return [dict.fromkeys(run.samples, b - a) for a, b in pairwise(bounds)]


def dealt(samples: Mapping[int, int], batches: int) -> list[dict[int, int]]:
    """Samples of each rank in each micro-batch: those of a rank are as far apart as they can be.

    Of micro-batch m all ranks together have samples m·B/M to (m+1)·B/M, whichever rank has them.
    """
    whole = sum(samples.values())
    moments = sorted(
        ((2 * j + 1) / (2 * n), place, rank)
        for place, (rank, n) in enumerate(samples.items())
        for j in range(n)
    )
    bounds = [m * whole // batches for m in range(batches + 1)]
    out = []
    for m in range(batches):
        mine = [rank for _, _, rank in moments[bounds[m] : bounds[m + 1]]]
        out.append({rank: mine.count(rank) for rank in samples})
    return out


@dataclass(frozen=True)
class Unit:
    """One layer, once: which of the workload's layers, and which time."""

    layer: int
    time: int
    name: str


def units(workload: Workload) -> list[Unit]:
    """Every layer of a step in forward order, under the names that rows use."""
    return [
        Unit(at, i, f"{layer.name}.{i}" if layer.times > 1 else layer.name)
        for at, layer in enumerate(workload.layers)
        for i in range(layer.times)
    ]


def spoken(name: str) -> tuple[str, ...]:
    """What a workload's weight may be called in PyTorch: `2/addmm.weight` is `2.weight` there.

    A norm that a layer took in is called by its own path: `2/3.batch_norm.weight` is `3.weight`.
    """
    dotted, inside = name.replace("/", "."), name.rpartition("/")[2]
    bare = [".".join([*parts[:-2], parts[-1]]) for parts in (dotted.split("."), inside.split("."))]
    return (name, dotted, *bare)
