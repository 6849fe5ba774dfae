"""What the placement search finds on mixed and plain clusters: the figures of the docs.

    python benchmarks/placement.py [--quick] [--seeds 0-1]
                                   [--only tag,hap-8,hap-32,plain,random,factors,speed,tree]

Every row: the step found, and how many times as long plain data parallelism (even samples,
all-reduce), the best and the worst other method take on the same evaluator. CPU seconds of this
process. `--quick` has smaller budgets and fewer models.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from table import Row, show

from foretell.cluster import Cluster
from foretell.cluster import load as machines
from foretell.search.placement import Evaluator, Placing, Problem, problem
from foretell.search.placement.baselines import drawn
from foretell.search.placement.factors import refined
from foretell.search.placement.mcts import Prior, Tree, even_chances, look_ahead
from foretell.search.placement.problem import ALL_REDUCE, FACTORS
from foretell.search.placement.space import EVEN, Action, Placement, actions, uniform
from foretell.workload import load

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
class Case:
    """One model on one cluster, and what came of it."""

    model: str
    kinds: int
    found: float
    plain: float
    best: float
    best_name: str
    worst: float
    cpu: float

    def row(self, where: str) -> Row:
        figure = (
            f"{self.found * 1e3:.1f} ms; {self.plain / self.found:.2f} × / "
            f"{self.best / self.found:.3f} × ({self.best_name}) / {self.worst / self.found:.2f} ×; "
            f"{self.cpu:.0f} s"
        )
        return Row(f"{where}, {self.model}", figure)


def tried(model: str, cluster: Cluster, each: int, planner: Placing) -> Case:
    """Search one case."""
    spec = MODELS[model][0]
    text = f"{spec}{',' if ':' in spec else ':'}batch={each}"
    planned = planner.plan(load(text), cluster)
    name = min(planned.baselines, key=lambda n: planned.baselines[n])
    return Case(
        model,
        len(cluster.devices_by_kind()),
        planned.predicted,
        planned.baselines.get("even-allreduce", float("nan")),
        planned.baselines[name],
        name,
        max(planned.baselines.values()),
        planned.cpu,
    )


def clusters() -> dict[str, tuple[Cluster, float]]:
    """The fixed test beds, each with how many times TAG's samples a device gets."""
    hap = machines("hap")
    few = {n: [r for r in range(hap.size) if hap.slots[r] < n // 8] for n in (8, 32)}
    return {
        "tag": (machines("tag"), 1.0),
        "hap-8": (hap.subset(few[8]), WEAK),
        "hap-32": (hap.subset(few[32]), WEAK),
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
                groups.append((device, many, draw.choice((8, 20))))
                total += many
        yield written(number, groups, draw.choice((2.81, 5.0)))


def written(number: int, groups: list[tuple[str, int, int]], between: float) -> Cluster:
    """A cluster by its file."""
    lines = [f'name = "random-{number}"', "[link.net]", 'kind = "ethernet"']
    lines += [f'bandwidth = "{between} GB/s"', 'latency = "6 us"', 'switch = "0.5 us"']
    for width in sorted({w for _, _, w in groups}):
        lines += [f"[link.in{width}]", 'kind = "pcie"', f'bandwidth = "{width} GB/s"']
        lines += ['latency = "0.5 us"']
    for device, many, width in groups:
        lines += ["[[node]]", "count = 1", f'device = "{device}"', f"devices = {many}"]
        lines += [f'pcie = "in{width}"', 'nic = "net"']
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.toml"
        path.write_text("\n".join(lines))
        return machines(str(path))


def fixed(
    planner: Placing, only: set[str], quick: bool, seeds: list[int]
) -> list[tuple[str, Case]]:
    """All models on the fixed test beds."""
    found = []
    for where, (cluster, times) in clusters().items():
        if where not in only:
            continue
        for model, (_, each) in MODELS.items():
            if quick and model not in QUICK:
                continue
            cases = [
                tried(model, cluster, max(1, round(each * times)), replace(planner, seed=s))
                for s in seeds
            ]
            found.append((where, min(cases, key=lambda case: case.found)))
            print(found[-1][1].row(where).what, found[-1][1].row(where).figure, file=sys.stderr)
            if len(cases) > 1:
                spread = max(c.found for c in cases) / min(c.found for c in cases) - 1
                print(f"  seeds differ by {spread:.1%}", file=sys.stderr)
    return found


def mixes(planner: Placing, count: int) -> list[tuple[str, Case]]:
    """Random topologies, the models in turn."""
    found = []
    for i, cluster in enumerate(topologies(count)):
        model = list(MODELS)[i % len(MODELS)]
        found.append((cluster.name, tried(model, cluster, MODELS[model][1], planner)))
        print(found[-1][1].row(cluster.name), file=sys.stderr)
    return found


def summary(found: list[tuple[str, Case]]) -> list[Row]:
    """What all rows come to."""
    gains = [case.best / case.found for _, case in found]
    mixed = [case.best / case.found for _, case in found if case.kinds > 1]
    worst = [case.worst / case.found for _, case in found]
    rows = [Row("slower than the best other method", f"{sum(g < 1 - 1e-9 for g in gains)}", "0")]
    if mixed:
        figure = f"{statistics.mean(mixed):.3f} × of {len(mixed)}, least {min(mixed):.3f} ×"
        rows.append(Row("over the best other method, mean where mixed", figure, "≥ 1.15 ×"))
    rows.append(Row("over the worst, at most", f"{max(worst):.2f} ×", "≥ 4.56 ×"))
    return rows


def factors() -> list[Row]:
    """Bytes and seconds of data parallelism with and without factors, by the exact program."""
    rows = []
    for text in ("vgg19:batch=4", "bert_small:batch=1,seq=32", "bert:batch=1,seq=32"):
        for between in (1.3, 0.125):  # GB/s: HAP's 10.4 Gb/s, and one tenth of it
            few = written(0, [("v100-32", 2, 8), ("p100-pcie", 2, 8)], between)
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


def tree() -> list[Row]:
    """Playouts from plain data parallelism until something is quicker, guided and not."""
    rows = []
    beds = [machines("tag"), *topologies(4, seed=7)]
    for i, (model, (spec, each)) in enumerate(MODELS.items()):
        cluster = beds[i % len(beds)]
        text = f"{spec}{',' if ':' in spec else ':'}batch={each}"
        on = problem(load(text), cluster)
        said = [_first_better(on, prior, 200) for prior in (look_ahead, even_chances)]
        words = [f"{n} ({took:,} simulations), {gain:.3f} ×" for n, took, gain in said]
        rows.append(Row(f"{model}, {cluster.name}", " / ".join(words), "≤ 50"))
    return rows


def _first_better(on: Problem, prior: Prior, most: int) -> tuple[str, int, float]:
    """Playouts until better than the start, simulations until then, and the gain after all."""
    judge = Evaluator(on)
    start = uniform(on, Action(0, ALL_REDUCE))
    plain = judge.seconds(replace(start, mode=EVEN))
    search = Tree(judge, [start], prior, plain)
    first, spent = "none", 0
    for n in range(1, most + 1):
        search.play(1)
        if first == "none" and search.best[1] < plain * (1 - 1e-6):
            first, spent = str(n), judge.evaluations
    return first, spent, plain / search.best[1]


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
    only = set(words.get("--only", "tag,hap-8,hap-32,plain,random,factors,speed,tree").split(","))
    first, _, last = words.get("--seeds", "0").partition("-")
    seeds = list(range(int(first), int(last or first) + 1))
    planner = Placing(playouts=16, strokes=18_000, polish=3000) if quick else Placing()
    if "speed" in only:
        show("Placements a second", speed())
    if "tree" in only:
        show("Playouts until better than data parallel, look-ahead / even chances", tree())
    if "factors" in only:
        show("Factors", factors())
    found = fixed(planner, only, quick, seeds)
    if "random" in only:
        found += mixes(planner, 10)
    if found:
        show(
            "Placements: step; over plain data parallel / best / worst other method; search",
            [case.row(where) for where, case in found] + summary(found),
        )


if __name__ == "__main__":
    main()
