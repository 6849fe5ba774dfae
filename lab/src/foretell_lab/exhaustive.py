"""The joint search beside every plan there is, on small random cases.

    python -m foretell_lab.exhaustive [--cases 100] [--first 0] [--evaluations 100] [-o FILE]
    python -m foretell_lab.exhaustive --again [--workers 12] -o FILE

A case is a small language model, a few devices (alike, or of two kinds) and a batch, drawn from its
number: two to four devices below LARGER, four or eight alike from there on. Its plans are all
products of degrees, micro-batches, ZeRO and sharding groups, recompute by block, sequence
parallelism, schedules, cuts of the blocks, frameworks, compiled or not, optimizer kernels, offload;
on two kinds of device also stages with meshes of their own. Simulated is every plan but those that
cannot be the best: where the closed form sees the devices that the simulation sees, plans whose
busiest stage and update alone take longer than the best so far (`at_least`, a tested lower bound);
elsewhere fused optimizers where the rest of the step alone takes longer; recompute and offload
where every plan fits without. The search may simulate `--evaluations`. Placements and single fused
ops are left out on both sides. `--again` asks the search anew and prices the best plans of the file
as of today, without looking for better ones (`repriced`, where a price changed).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from foretell.cluster import Cluster, load
from foretell.io import write_text
from foretell.plan import Plan
from foretell.plan.plan import Segment, plan_of_segments
from foretell.plan.program import FAMILIES, ONE_CHUNK
from foretell.search.joint import Joint
from foretell.search.refine import Evaluator, Found
from foretell.workload import Workload
from foretell.workload import load as load_workload
from foretell_lab.workers import answers

DEVICES = ("a100-80", "a100-40", "v100-16", "h100", "t4")
AXES = "dp,tp,pp,cp,ep,zero,recompute,batch,schedule,offload,fusion"
NEXT = 24  # plans of a case that its row keeps, best first, so that they can be priced again
BATCH = 48  # plans simulated before the best so far is looked at again
BOX = '[[node]]\ncount = 1\ndevice = "{device}"\ndevices = {many}\nnic = "{nic}"\n'


LARGER = 120  # number of the first case of more devices


def drawn(number: int, folder: Path) -> tuple[Workload, Cluster, int, str]:
    """Workload, cluster and batch of one case."""
    draw = random.Random(number)
    heads = draw.choice((4, 8, 16))
    is_larger = number >= LARGER
    layers, hidden = (
        draw.choice((2, 3, 4) if is_larger else (2, 2, 3)),
        heads * draw.choice((64, 128)),
    )
    seq, vocab = draw.choice((256, 1024, 2048)), draw.choice((1024, 32768))
    model = f"gpt:layers={layers},hidden={hidden},heads={heads},seq={seq},vocab={vocab}"
    kinds, many = draw.sample(DEVICES, draw.choice((1, 1, 2))), draw.choice((1, 2))
    if is_larger:
        kinds, many = kinds[:1], draw.choice((2, 4))
    nic = draw.choice(("ethernet-25g", "infiniband-hdr"))
    rows = [BOX.format(device=device, many=many, nic=nic) for device in kinds]
    rows *= 2 if is_larger or len(rows) == many == 1 else 1
    path = folder / f"case-{number}.toml"
    path.write_text(f'name = "case-{number}"\n' + "".join(rows))
    cluster = load(str(path))
    batch = cluster.size * draw.choice((1, 2, 4) if is_larger else (1, 2))
    return load_workload(model), cluster, batch, f"{model} on {'+'.join(kinds)} × {cluster.size}"


def every_plan(
    workload: Workload, cluster: Cluster, batch: int, *, recompute: bool = True
) -> Iterator[Plan]:
    """All plans of a case, or those that recompute nothing; some cannot be."""
    node = int((cluster.nodes == cluster.nodes[0]).sum())
    for plan in _in_degrees(workload, cluster.size, batch, recompute):
        yield plan
        if plan.zero and 1 < node < plan.dp and plan.dp % node == 0:
            yield plan.but(shard=node)
        if plan.zero == 3 and plan.dp > 1:
            yield plan.but(shard=1)
    if len(cluster.devices_by_kind()) > 1:
        yield from _in_segments(workload, cluster, batch, recompute)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _again(blocks: int, recompute: bool) -> list[dict[str, Any]]:
    """Recompute of none, some or all blocks of a stage."""
    if not recompute:
        return [{"recompute": "none"}]
    some = [{"recompute": r, "recompute_layers": n}
            for r in ("selective", "full") for n in range(blocks)]  # fmt: skip
    return [{"recompute": "none"}, *some]


def _in_degrees(workload: Workload, size: int, batch: int, recompute: bool) -> Iterator[Plan]:
    for dp, tp, pp in product(_divisors(size), repeat=3):
        if dp * tp * pp != size or batch % dp:
            continue
        share = batch // dp
        for sp, micro, again, zero, (schedule, chunks), (framework, compiled) in product(
            (True, False) if tp > 1 else (False,),
            _divisors(share),
            _again(-(-workload.num_blocks // pp), recompute),
            (0, 1, 2, 3) if dp > 1 else (0, 3),
            _schedules(pp),
            (("", False), ("ddp", False), ("ddp", True), ("fsdp", False), ("fsdp", True)),
        ):
            if (zero == 3) != (framework == "fsdp") and framework:
                continue
            plain = Plan(
                dp=dp, tp=tp, pp=pp, sp=sp, micro_batch=micro, global_batch=batch, zero=zero,
                schedule=schedule, chunks=chunks, framework=framework, compile=compiled, **again,
            )  # fmt: skip
            yield plain
            if pp > 1 and chunks == 1:
                yield from (plain.but(layers=cut) for cut in _cuts(workload.num_blocks, pp))


def _schedules(pp: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [("1f1b", 1)]
    return [(name, 2 if name == "interleaved" else 1) for name in FAMILIES]


def _cuts(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Blocks of stages that are one or more each."""
    if stages == 1:
        yield (blocks,)
        return
    for first in range(1, blocks - stages + 2):
        yield from ((first, *rest) for rest in _cuts(blocks - first, stages - 1))


def _in_segments(
    workload: Workload, cluster: Cluster, batch: int, recompute: bool
) -> Iterator[Plan]:
    """Two stages, one on each kind of device, either way round."""
    parts = [tuple(map(int, ranks)) for ranks in cluster.devices_by_kind().values()]
    for order, cut, whole in product(
        (parts, parts[::-1]), _cuts(workload.num_blocks, 2), _divisors(batch)
    ):
        rows = [
            list(_stage(n, ranks, whole, batch, recompute))
            for n, ranks in zip(cut, order, strict=True)
        ]
        for schedule, (framework, compiled), pair in product(
            ONE_CHUNK, (("", False), ("ddp", True), ("fsdp", True)), product(*rows)
        ):
            if (framework == "fsdp") != all(one.plan.zero == 3 for one in pair):
                continue
            common = Plan(
                global_batch=batch, schedule=schedule, framework=framework, compile=compiled
            )
            yield plan_of_segments(common, list(pair))


def _stage(
    blocks: int, ranks: tuple[int, ...], whole: int, batch: int, recompute: bool
) -> Iterator[Segment]:
    for tp in _divisors(len(ranks)):
        dp = len(ranks) // tp
        for again, zero in product(_again(blocks, recompute), (0, 1, 3) if dp > 1 else (0, 3)):
            if whole % dp == 0:
                own = Plan(
                    dp=dp, tp=tp, sp=tp > 1, zero=zero, shard=int(zero == 3 and dp > 1),
                    micro_batch=whole // dp, global_batch=batch, **again,
                )  # fmt: skip
                yield Segment(blocks, ranks, own)


@dataclass
class Everything:
    """Every plan of a case: simulated, or passed over because it cannot be the best."""

    workload: Workload
    cluster: Cluster
    plans: int = 0  # looked at
    over: float = 0.0  # closed form above the simulation, at the most
    tight: float = 0.0  # lower bound over the simulation, at the most

    def best(self, batch: int) -> list[Found]:
        """The plans that were simulated and fit, the shortest step first."""
        self.on = Evaluator(self.workload, self.cluster, budget=1 << 30)
        every = list(dict.fromkeys(every_plan(self.workload, self.cluster, batch)))
        self.plans = 4 * len(every)  # each with either optimizer kernel, with and without offload
        plain = every_plan(self.workload, self.cluster, batch, recompute=False)
        found = self._of(list(dict.fromkeys(plain)))
        if any(one is not None and not one.fits for one in self.on.known.values()):
            found += self._of(every)
            lacking = [p for p in every if (one := self.on.known.get(str(p))) and not one.fits]
            found += self.on.of([plan.but(offload=True) for plan in lacking])
        least = min(found, key=Found.key)
        rest = [f.plan for f in found if not self._is_seen(f.plan) and _rest(f) < least.step]
        self.on.of([plan.but(optimizer_kernels="fused") for plan in rest])
        return self.on.ranked()

    def _of(self, plans: list[Plan]) -> list[Found]:
        """Those of some plans that could be the best, simulated."""
        found = self._by_closed_form([p for p in plans if self._is_seen(p)])
        return found + self.on.of([p for p in plans if not self._is_seen(p)])

    def _is_seen(self, plan: Plan) -> bool:
        """Whether the closed form prices every stage on the devices that it has."""
        return not plan.segments and (plan.pp == 1 or len(self.cluster.devices_by_kind()) == 1)

    def _by_closed_form(self, plans: list[Plan]) -> list[Found]:
        able = [plan for plan in plans if self.on.is_valid(plan)]
        able += [plan.but(optimizer_kernels="fused") for plan in able]
        guess = self.on.estimated(able)
        order, found, least = sorted(guess, key=lambda p: (guess[p].cost, str(p))), [], math.inf
        for at in range(0, len(order), BATCH):
            new = self.on.of([p for p in order[at : at + BATCH] if guess[p].least < least])
            found += new
            least = min([least, *(one.step for one in new)])
            self.over = max([self.over, *(guess[f.plan].cost / f.step - 1 for f in new)])
            self.tight = max([self.tight, *(guess[f.plan].least / f.step for f in new)])
        return found


def _rest(found: Found) -> float:
    """Seconds of a step without its optimizer."""
    return found.step - found.prediction.breakdown["update_s"]


def compared(number: int, evaluations: int, folder: Path) -> dict[str, Any]:
    """The best plan there is and the one that the search finds."""
    workload, cluster, batch, name = drawn(number, folder)
    every = Everything(workload, cluster)
    best = every.best(batch)
    row = {
        "case": name,
        "plans": every.plans,
        "simulated": every.on.evaluations,
        "over": every.over,
        "tight": every.tight,
        "best_s": best[0].step,
        "best": str(best[0].plan),
        "next": [str(one.plan) for one in best[1:NEXT]],
    }
    return row | _searched(workload, cluster, batch, evaluations, best[0].step)


def repriced(row: dict[str, Any], number: int, evaluations: int, folder: Path) -> dict[str, Any]:
    """A row with the best plans it knows priced anew, and the search asked again."""
    workload, cluster, batch, _ = drawn(number, folder)
    on = Evaluator(workload, cluster, budget=1 << 30)
    texts = [row["best"], *row.get("next", ())]
    best = min(on.of([Plan.parse(text) for text in texts]), key=Found.key)
    same = abs(best.step / row["best_s"] - 1) < 1e-9 and "repriced" not in row
    kept = (
        row | {"best_s": best.step, "best": str(best.plan)} | ({} if same else {"repriced": True})
    )
    kept["next"] = [text for text in texts if text != str(best.plan)]
    return kept | _searched(workload, cluster, batch, evaluations, best.step)


def _searched(
    workload: Workload, cluster: Cluster, batch: int, evaluations: int, best: float
) -> dict[str, Any]:
    """What the search finds."""
    planner = Joint(evaluations=evaluations, global_batch=batch, only=AXES)
    found = planner.plan(workload, cluster)
    return {
        "found_s": found.predicted,
        "found": str(found.plan),
        "bound_s": found.bound,
        "ratio": found.predicted / best,
    }


def main() -> None:
    """Judge cases that a file lacks and print how far the search is from the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--evaluations", type=int, default=100)
    parser.add_argument("--again", action="store_true", help="ask the search anew, as the file")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0, help="of workers; all the time if 0")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    rows = json.loads(given.output.read_text()) if given.output and given.output.is_file() else {}
    cases = [
        (number, given.evaluations, rows.get(str(number)))
        for number in range(given.first, given.first + given.cases)
        if (str(number) in rows) == given.again
    ]
    if given.workers > 1:
        cases.sort(key=lambda case: -case[2]["simulated"] if case[2] else 0)
    for (number, *_), row in answers(_row, cases, given.workers, given.seconds):
        if "error" in row:
            print(f"{number:4d} {row['error']}", flush=True)
            continue
        rows[str(number)] = row
        print(
            f"{number:4d} {row['ratio']:.4f} of {row['plans']} plans, "
            f"{row['simulated']} simulated, {row['case']}",
            flush=True,
        )
        if given.output:
            write_text(given.output, json.dumps(rows, indent=1))
    print(summary(list(rows.values())))


def _row(case: tuple[int, int, dict[str, Any] | None]) -> dict[str, Any]:
    number, evaluations, had = case
    with tempfile.TemporaryDirectory() as folder:
        if had is None:
            return compared(number, evaluations, Path(folder))
        return repriced(had, number, evaluations, Path(folder))


def summary(rows: list[dict[str, Any]]) -> str:
    """How far from the best plan the search is."""
    ratios = [row["ratio"] for row in rows]
    near = sum(ratio <= 1.03 for ratio in ratios)
    gaps = [1 - row["bound_s"] / row["found_s"] for row in rows]
    return (
        f"{len(rows)} cases: {near} within 3 % of the best plan, worst {max(ratios) - 1:.2%} off; "
        f"bound {min(gaps):.0%} to {max(gaps):.0%} below the answers; the closed form "
        f"{max(row['over'] for row in rows):.0%} above a simulation at the most"
    )


if __name__ == "__main__":
    main()
