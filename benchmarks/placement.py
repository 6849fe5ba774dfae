"""What the placement search finds on mixed and plain clusters: the figures of the docs.

    python benchmarks/placement.py [--quick] [--seeds 0-2] [--jobs 1] [--pairs 40] [--weights FILE]
                  [--only tag,hap-8,hap-32,hap-64,plain,random,wide,factors,speed,policy]

Every row: the step found, and how many times as long plain data parallelism (even samples,
all-reduce), the best and the worst other method take on the same evaluator; CPU seconds of one
search. With several seeds (of our search and of the methods that draw) each figure is the middle
one, with the least and the most behind it. `--quick` has smaller budgets and fewer models, `--jobs`
so many processes. `policy` judges the tree search with and without its network, on models and
devices that no training has seen.
"""

import random
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from placement_judged import Play, ablation, policy, spread
from table import Row, show

from foretell.cluster import Cluster
from foretell.cluster import load as machines
from foretell.search.kit import Planned
from foretell.search.placement import Evaluator, PlacementPlanner, problem
from foretell.search.placement.planner import drawn
from foretell.search.placement.policy import Learned, read, shipped
from foretell.search.placement.problem import (
    ALL_REDUCE,
    FACTORS,
    Action,
    Placement,
    actions,
    refined,
    uniform,
)
from foretell.workload import load
from foretell_lab.policy import worlds

# TAG's models (its batches 120, 600 and 32 for 16 devices; BERT with its vocabulary), and GPT-2.
MODELS = {
    "InceptionV3": ("inception_v3", 8),
    "ResNet-101": ("resnet101", 8),
    "VGG-19": ("vgg19", 8),
    "Transformer": ("transformer", 37),
    "BERT-small": ("bert:layers=4,hidden=1024,heads=16,vocab=305220,head=mlm", 2),
    "BERT-large": ("bert_large:vocab=30522,head=mlm", 2),
    "GPT-2": ("gpt2:dtype=fp32", 1),
}
QUICK = ("ResNet-101", "VGG-19", "BERT-large")
WEAK = 4  # HAP scales weakly; its 64 samples a device would leave BERT-large no memory


@dataclass(frozen=True)
class Job:
    """One search to make."""

    where: str
    model: str
    cluster: Cluster
    each: int  # samples a device
    planner: PlacementPlanner


def made(job: Job) -> Planned:
    """The search of a job."""
    spec = MODELS[job.model][0]
    text = f"{spec}{',' if ':' in spec else ':'}batch={job.each}"
    return job.planner.plan(load(text), job.cluster)


@dataclass(frozen=True)
class Case:
    """One model on one cluster, and what came of it from some seeds."""

    where: str
    model: str
    kinds: int
    plans: tuple[Planned, ...]

    def over(self, *without: str) -> list[float]:
        """How many times as long the best other method takes, by seed, ascending."""
        best = [min(t for n, t in p.baselines.items() if n not in without) for p in self.plans]
        return sorted(b / p.predicted for b, p in zip(best, self.plans, strict=True))

    @property
    def rival(self) -> str:
        """The best other method, from the first seed."""
        others = self.plans[0].baselines
        return min(others, key=lambda name: others[name])

    @property
    def over_worst(self) -> float:
        return statistics.median(max(p.baselines.values()) / p.predicted for p in self.plans)

    def row(self) -> Row:
        steps, gains = sorted(p.predicted * 1e3 for p in self.plans), self.over()
        plain = [p.baseline / p.predicted for p in self.plans]
        figure = (
            f"{spread(steps, '.1f')} ms; {statistics.median(plain):.2f} × / {spread(gains, '.3f')} "
            f"× ({self.rival}) / {self.over_worst:.2f} ×; "
            f"{statistics.median(p.cpu for p in self.plans):.0f} s"
        )
        return Row(f"{self.where}, {self.model}", figure)


def searched(jobs: list[Job], seeds: list[int], play: Play) -> list[Case]:
    """All searches, from each seed."""
    each = [replace(j, planner=replace(j.planner, seed=s)) for j in jobs for s in seeds]
    plans, found = iter(play(made, each)), []
    for job in jobs:
        some = tuple(next(plans) for _ in seeds)
        kinds = len(job.cluster.devices_by_kind())
        found.append(Case(job.where, job.model, kinds, some))
        print(found[-1].row(), file=sys.stderr)
    return found


def clusters() -> dict[str, tuple[Cluster, float]]:
    """The fixed test beds, each with how many times TAG's samples a device gets."""
    hap = machines("hap")
    few = {n: [r for r in range(hap.size) if hap.slots[r] < n // 8] for n in (8, 32, 64)}
    return {
        "tag": (machines("tag"), 1.0),
        "hap-8": (hap.subset(few[8]), WEAK),
        "hap-32": (hap.subset(few[32]), WEAK),
        "hap-64": (hap.subset(few[64]), WEAK),
        "plain": (machines("p3.16xlarge:nodes=2"), 1.0),
    }


def topologies(count: int, seed: int = 0) -> Iterator[Cluster]:
    """Random mixes as TAG draws them: 2 to 4 groups of at most 16 devices, two widths of links."""
    draw = random.Random(seed)
    for number in range(count):
        groups, total = [], 0
        for device in draw.sample(["p100-pcie", "1080ti", "v100-32", "t4"], draw.choice((2, 3, 4))):
            many = draw.choice((2, 3, 4, 6, 8))
            if total + many <= 16 or not groups:
                groups.append((device, many, 1, float(draw.choice((8, 20)))))
                total += many
        yield worlds.written(f"random-{number}", groups, draw.choice((2.81, 5.0)))


def wide(count: int) -> Iterator[Cluster]:
    """Wider mixes: five kinds from K80 to A100, up to four nodes of each, 10 to 100 Gb/s."""
    draw = random.Random(0)
    for number in range(count):
        yield replace(worlds.cluster(draw, worlds.UNSEEN_DEVICES), name=f"wide-{number}")


def fixed(planner: PlacementPlanner, only: set[str], quick: bool) -> list[Job]:
    """All models on the fixed test beds."""
    return [
        Job(where, model, cluster, max(1, round(each * times)), planner)
        for where, (cluster, times) in clusters().items()
        for model, (_, each) in MODELS.items()
        if where in only and (not quick or model in QUICK)
    ]


def mixes(planner: PlacementPlanner, machines: Iterator[Cluster]) -> list[Job]:
    """Random topologies, the models in turn."""
    found = []
    for i, cluster in enumerate(machines):
        model = list(MODELS)[i % len(MODELS)]
        where = f"{cluster.name} ({worlds.title(cluster)})"
        found.append(Job(where, model, cluster, MODELS[model][1], planner))
    return found


def summary(found: list[Case]) -> list[Row]:
    """What all rows come to."""
    least = [case.over()[0] for case in found]
    rows = [Row("slower than the best other method", f"{sum(g < 1 - 1e-9 for g in least)}", "0")]
    mixed = [case for case in found if case.kinds > 1]
    beds = dict.fromkeys(case.where.partition("-")[0] for case in mixed)
    for bed in (*beds, ""):
        some = [case for case in mixed if case.where.startswith(bed)]
        rows += _means(some, f"{bed or 'all'}, mixed") if some else []
    for name in sorted({n for case in mixed for n in case.plans[0].baselines}):
        pairs = [(c.plans[0].baselines.get(name), c.plans[0].predicted) for c in mixed]
        over = [t / found for t, found in pairs if t]
        rows.append(Row(f"over {name}, mean where mixed", f"{statistics.mean(over):.2f} ×"))
    worst = max(case.over_worst for case in found)
    return [*rows, Row("over the worst, at most", f"{worst:.2f} ×", "≥ 4.56 ×")]


def _means(some: list[Case], what: str) -> list[Row]:
    rows = []
    for title, without in (("", ()), (" but `random`", ("random",))):
        by_seed = [statistics.mean(x) for x in zip(*_seeded(some, without), strict=True)]
        least = min(min(row) for row in _seeded(some, without))
        figure = f"{spread(sorted(by_seed), '.3f')} × of {len(some)}, least {least:.3f} ×"
        rows.append(Row(f"{what}: mean over the best other method{title}", figure, "≥ 1.15 ×"))
    return rows


def _seeded(some: list[Case], without: tuple[str, ...]) -> list[list[float]]:
    """Over the best other method: a row a case, a column a seed."""
    return [
        [min(t for n, t in p.baselines.items() if n not in without) / p.predicted for p in c.plans]
        for c in some
    ]


def factors() -> list[Row]:
    """Bytes and seconds of data parallelism with and without factors, by the exact program."""
    rows = []
    for text in ("vgg19:batch=4", "bert_small:batch=1,seq=32", "bert:batch=1,seq=32"):
        for between in (1.3, 0.125):  # GB/s: HAP's 10.4 Gb/s, and one tenth of it
            few = worlds.written("few", [("v100-32", 2, 1, 8.0), ("p100-pcie", 2, 1, 8.0)], between)
            rows.append(_with_and_without(text, few, f"{between * 8:g} Gb/s"))
    return rows


def _with_and_without(text: str, cluster: Cluster, what: str) -> Row:
    on = problem(load(text), cluster)
    plain = uniform(on, Action(0, ALL_REDUCE))
    one, sent = refined(on, plain)
    before, after = Evaluator(on).seconds(plain), Evaluator(one).seconds(sent)
    t = one.tables
    moved = sum(
        2 * t.rest[0, g] + t.factors[0, g] * t.batch if a.way == FACTORS else 2 * t.gradient[g]
        for g, a in enumerate(sent.actions)
    )
    size = f"{2 * t.gradient.sum() / 1e6:.0f} → {moved / 1e6:.0f} MB"
    return Row(f"{text}, {what}", f"{before * 1e3:.1f} → {after * 1e3:.1f} ms, {size}", "≤")


def speed() -> list[Row]:
    """Placements a second: runs of groups at random, and every group for itself."""
    rows = []
    for text in ("vgg19:batch=8", "bert_large:batch=2", "resnet101:batch=8"):
        on = problem(load(text), machines("tag"))
        draw = random.Random(0)
        wild = [
            Placement(tuple(draw.choice(actions(on, g)) for g in range(len(on.groups))))
            for _ in range(2000)
        ]
        for what, some in (("runs", drawn(on, 4000, 1)), ("every group apart", wild)):
            judge = Evaluator(on)
            judge.many(some[:2])
            begin = time.process_time()
            judge.many(some[2:])
            rate = judge.evaluations / (time.process_time() - begin)
            rows.append(Row(f"{text}, {what}", f"{rate:,.0f} a second", "≥ 2000"))
    return rows


def main() -> None:
    words = dict(zip(sys.argv, [*sys.argv[1:], ""], strict=True))
    quick = "--quick" in sys.argv
    every = "tag,hap-8,hap-32,hap-64,plain,random,wide,factors,speed,policy,ablation"
    only = set(words.get("--only", every).split(","))
    first, _, last = words.get("--seeds", "0").partition("-")
    seeds = list(range(int(first), int(last or first) + 1))
    planner = (
        PlacementPlanner(playouts=100, strokes=18_000, polish=3000) if quick else PlacementPlanner()
    )
    if "speed" in only:
        show("Placements a second", speed())
    if "factors" in only:
        show("Factors", factors())
    if "ablation" in only:
        rows = ablation(int(words.get("--pairs", "12")), again="--again" in sys.argv)
        show("The whole search without the network, at equal CPU, on unseen pairs", rows)
    jobs = fixed(planner, only, quick)
    for name, drawn_ones in (("random", topologies(10)), ("wide", wide(10))):
        jobs += mixes(planner, drawn_ones) if name in only else []
    count = int(words.get("--jobs", "1"))
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        play: Play = pool.map if count > 1 else map
        if "policy" in only:
            weights = words.get("--weights")
            prior = Learned(read(Path(weights).read_bytes())) if weights else shipped()
            rows = policy(prior, int(words.get("--pairs", "40")), seeds, play)
            show("The tree search on unseen models and devices", rows)
        found = searched(jobs, seeds, play) if jobs else []
    if found:
        show(
            "Placements: step; over plain data parallel / best / worst other method; search",
            [case.row() for case in found] + summary(found),
        )


if __name__ == "__main__":
    main()
