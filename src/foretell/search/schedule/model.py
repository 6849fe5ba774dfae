"""Problems from models: blocks of a workload on a cluster, with real times, memory, messages.

    found = model(workload, cluster, "m", micro_batches=16)
    schedule(found.problem, 16), found.plan(that)

Ranks that always work together are one device of the problem. A stage is a forward block and,
where something before it or in it is trained, a backward block or two gradients. Recompute and
offload of each stage are choices that `choose` decides; messages are priced by their links.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypedDict

from foretell.cluster import Cluster
from foretell.errors import InfeasibleError, InputError
from foretell.plan import Plan, check
from foretell.plan.place_costs import Prices
from foretell.plan.places import Act, Place, copies, edges, texts
from foretell.search.schedule import blocks as made
from foretell.search.schedule.arrange import Asked, arrange, arrangements
from foretell.search.schedule.blocks import Decide
from foretell.search.schedule.links import Overlap, linked
from foretell.search.schedule.problem import Mode, Problem
from foretell.search.schedule.schedule import Schedule
from foretell.workload import Workload


class Options(TypedDict, total=False):
    """What else is asked of a problem, and not of where its stages are."""

    split: bool  # gradients of inputs and of weights apart
    recompute: Decide
    offload: Decide
    overlap: Overlap


@dataclass(frozen=True)
class Model:
    """A problem and what its blocks and devices stand for."""

    problem: Problem
    shape: str
    prices: Prices
    places: tuple[Place, ...]
    ranks: tuple[tuple[int, ...], ...]  # of each device

    @property
    def copies(self) -> int:
        """Samples that one micro-batch of the problem stands for, in micro-batches of the plan."""
        return copies(self.places, self.prices.workload)

    def chosen(self, names: Sequence[str]) -> Model:
        """The model once some choices are taken."""
        ways = {int(n.split()[1]): n.split()[0] for n in names}
        found = tuple(
            replace(p, ways=tuple(sorted({*p.ways, ways[s]}))) if s in ways else p
            for s, p in enumerate(self.places)
        )
        return replace(self, problem=self.problem.choosing(names), places=found)

    def plan(self, found: Schedule) -> Plan:
        """The plan of a schedule of this problem: it lowers, predicts and runs like any other."""
        workload = self.prices.workload
        rows: list[tuple[str, ...]] = [()] * self.prices.cluster.size
        for device, ranks in enumerate(self.ranks):
            row = tuple(
                str(a) for a in (_act(found, s.block, s.micro_batch) for s in found.on(device)) if a
            )
            for rank in ranks:
                rows[rank] = row
        batch = self.prices.plan.micro_batch * found.micro_batches * self.copies
        return self.prices.plan.but(
            stages=texts(self.places, workload), actions=tuple(rows), schedule="actions",
            global_batch=batch, recompute="none", model=workload.fingerprint(),
        )  # fmt: skip


def _act(found: Schedule, block: int, micro_batch: int) -> Act | None:
    """The action of a block; messages are nobody's action."""
    one = found.problem.blocks[block]
    return None if one.kind == "C" else Act(made.stage_of(one), one.kind, micro_batch)


def model(
    workload: Workload,
    cluster: Cluster,
    shape: str = "v",
    *,
    plan: Plan | None = None,
    micro_batches: int = 8,
    mode: Mode = "train",
    split: bool = False,
    recompute: Decide = "auto",
    offload: Decide = "no",
    frozen: Sequence[str] = (),
    overlap: Overlap = "beside",
) -> Model:
    """The problem of a shape; `plan` says program, formats and micro-batch."""
    asked = _asked(workload, cluster, plan, micro_batches, mode, recompute, frozen)
    try:
        found = arrange(shape, asked)
    except InfeasibleError:
        if recompute != "auto" or mode == "infer":
            raise
        found = arrange(shape, replace(asked, recompute=True))
    return problem_of(
        found, asked, shape, split=split, recompute=recompute, offload=offload, overlap=overlap
    )


def models(
    workload: Workload,
    cluster: Cluster,
    *,
    plan: Plan | None = None,
    micro_batches: int = 8,
    mode: Mode = "train",
    split: bool = False,
    recompute: Decide = "auto",
    offload: Decide = "no",
    frozen: Sequence[str] = (),
    overlap: Overlap = "beside",
) -> list[Model]:
    """The problems of all shapes that fit."""
    asked = _asked(workload, cluster, plan, micro_batches, mode, recompute, frozen)
    tries = [asked]
    if recompute == "auto" and mode == "train":
        tries.append(replace(asked, recompute=True))
    options: Options = {
        "split": split, "recompute": recompute, "offload": offload, "overlap": overlap,
    }  # fmt: skip
    out: dict[str, Model] = {}
    for one in tries:
        for shape, found in arrangements(one):
            with suppress(InfeasibleError):
                out.setdefault(shape, problem_of(found, one, shape, **options))
    if not out:
        raise InfeasibleError(
            f"no placement of `{workload.name}` fits into the memory of `{cluster.name}`",
            hint="take more ranks, a smaller micro-batch, or recompute",
        )
    return list(out.values())


def _asked(
    workload: Workload, cluster: Cluster, plan: Plan | None, micro_batches: int, mode: Mode,
    recompute: Decide, frozen: Sequence[str],
) -> Asked:  # fmt: skip
    given = plan or Plan()
    degrees = [f"{k}={v}" for k, v in given.degrees().items() if v > 1]
    if degrees or given.stages or given.actions:
        raise InputError(
            f"a schedule places stages itself, and the plan says {' '.join(degrees) or 'stages'}",
            hint="give only what the search does not decide: micro_batch, stack, dtype, optimizer",
        )
    micro = given.micro_batch or 1
    batch = micro * micro_batches
    # one rank stands for all: what is checked is the batch, the format and the program
    filled = check(given.but(micro_batch=micro, global_batch=batch), workload, cluster.subset([0]))
    is_train = mode == "train"
    again = recompute == "yes" or given.recompute != "none"
    prices = Prices(filled.but(recompute="none"), workload, cluster)
    return Asked(prices, micro_batches, is_train, again and is_train, tuple(frozen))


def problem_of(
    found: tuple[Place, ...],
    asked: Asked,
    shape: str,
    *,
    split: bool = False,
    recompute: Decide = "no",
    offload: Decide = "no",
    overlap: Overlap = "beside",
) -> Model:
    """The problem of stages that are placed."""
    prices, links = asked.prices, edges(found, asked.workload)
    if offload == "yes" and asked.trains:
        found = tuple(
            replace(p, ways=(*p.ways, "offload")) if made.has_block(prices, p) else p for p in found
        )
    ranks = made.folded(found)
    device = {r: d for d, group in enumerate(ranks) for r in group}
    back = made.trained(found, links) if asked.trains else set()
    where = [tuple(sorted({device[r] for r in p.ranks})) for p in found]
    blocks = [
        made.block_of(prices, p, s, kind, where[s], s in back, split)
        for s, p in enumerate(found)
        for kind in made.kinds(p, s in back, split)
    ]
    bare = Problem(
        tuple(blocks),
        tuple(made.waits(blocks, links)),
        len(ranks),
        tuple(min(made.free(prices, found, r, bool(back)) for r in group) for group in ranks),
        mode="train" if back else "infer",
        name=f"{shape}: {asked.workload.name}",
        choices=made.choices(prices, found, where, back, split, recompute, offload),
    )
    priced = linked(bare, made.price(prices, found, links), overlap=overlap)
    return Model(priced, shape, prices, found, ranks)
