"""What the placement search finds on mixed and plain clusters: the figures of the docs.

    python benchmarks/placement.py [--quick] [--seeds 0-2] [--pairs 40] [--weights FILE]
                              [--only tag,hap-8,hap-32,plain,random,wide,factors,speed,policy]

Every row: the step found, and how many times as long plain data parallelism (even samples,
all-reduce), the best and the worst other method take on the same evaluator. With several seeds the
middle one is shown, and how far they differ. CPU seconds of this process. `--quick` has smaller
budgets and fewer models. `policy` judges the tree search with and without its network, on models
and devices that no training has seen.
"""

import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from table import Row, show

from foretell.cluster import Cluster
from foretell.cluster import load as machines
from foretell.search.placement import Evaluator, Placing, problem
from foretell.search.placement.baselines import drawn
from foretell.search.placement.factors import refined
from foretell.search.placement.mcts import Prior, look_ahead
from foretell.search.placement.policy import worlds
from foretell.search.placement.policy.judge import Judged, judged
from foretell.search.placement.policy.prior import Learned, read, shipped
from foretell.search.placement.problem import ALL_REDUCE, FACTORS
from foretell.search.placement.space import Action, Placement, actions, uniform
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
    others: Mapping[str, float]
    cpu: float
    spread: float = 0.0  # of seeds, as a share

    def over(self, *without: str) -> tuple[float, str]:
        """How many times as long the best other method takes, and which it is."""
        name = min((n for n in self.others if n not in without), key=lambda n: self.others[n])
        return self.others[name] / self.found, name

    @property
    def over_worst(self) -> float:
        return max(self.others.values()) / self.found

    def row(self, where: str) -> Row:
        gain, name = self.over()
        figure = (
            f"{self.found * 1e3:.1f} ms; {self.plain / self.found:.2f} × / {gain:.3f} × ({name}) / "
            f"{self.over_worst:.2f} ×; {self.cpu:.0f} s"
        )
        return Row(
            f"{where}, {self.model}", figure + (f" ± {self.spread:.1%}" if self.spread else "")
        )


def tried(model: str, cluster: Cluster, each: int, planner: Placing, seeds: list[int]) -> Case:
    """Search one case from some seeds; the middle answer."""
    spec = MODELS[model][0]
    text = f"{spec}{',' if ':' in spec else ':'}batch={each}"
    plans = [replace(planner, seed=s).plan(load(text), cluster) for s in seeds]
    took = sorted(planned.predicted for planned in plans)
    return Case(
        model,
        len(cluster.devices_by_kind()),
        took[len(took) // 2],
        plans[0].baselines.get("even-allreduce", float("nan")),
        plans[0].baselines,
        plans[0].cpu,
        took[-1] / took[0] - 1,
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
                groups.append((device, many, 1, float(draw.choice((8, 20)))))
                total += many
        yield worlds.written(f"random-{number}", groups, draw.choice((2.81, 5.0)))


def wide(count: int) -> Iterator[Cluster]:
    """Wider mixes: five kinds from K80 to A100, up to four nodes of each, 10 to 100 Gb/s."""
    draw = random.Random(0)
    for number in range(count):
        yield replace(worlds.cluster(draw, worlds.UNSEEN_DEVICES), name=f"wide-{number}")


def fixed(
    planner: Placing, only: set[str], quick: bool, seeds: list[int]
) -> list[tuple[str, Case]]:
    """All models on the fixed test beds."""
    found = []
    for where, (cluster, times) in clusters().items():
        for model, (_, each) in MODELS.items() if where in only else ():
            if not quick or model in QUICK:
                case = tried(model, cluster, max(1, round(each * times)), planner, seeds)
                found.append((where, case))
                print(case.row(where), file=sys.stderr)
    return found


def mixes(
    planner: Placing, machines: Iterator[Cluster], seeds: list[int]
) -> list[tuple[str, Case]]:
    """Random topologies, the models in turn."""
    found = []
    for i, cluster in enumerate(machines):
        model = list(MODELS)[i % len(MODELS)]
        case = tried(model, cluster, MODELS[model][1], planner, seeds)
        found.append((f"{cluster.name} ({worlds.title(cluster)})", case))
        print(case.row(found[-1][0]), file=sys.stderr)
    return found


def summary(found: list[tuple[str, Case]]) -> list[Row]:
    """What all rows come to."""
    gains = [case.over()[0] for _, case in found]
    rows = [Row("slower than the best other method", f"{sum(g < 1 - 1e-9 for g in gains)}", "0")]
    mixed = [case for _, case in found if case.kinds > 1]
    for what, without in (("", ()), (", without `random`", ("random",))):
        if mixed:
            over = [case.over(*without)[0] for case in mixed]
            figure = f"{statistics.mean(over):.3f} × of {len(over)}, least {min(over):.3f} ×"
            rows.append(
                Row(f"over the best other method, mean where mixed{what}", figure, "≥ 1.15 ×")
            )
    for name in sorted({n for case in mixed for n in case.others}):
        over = [case.others[name] / case.found for case in mixed if name in case.others]
        rows.append(Row(f"over {name}, mean where mixed", f"{statistics.mean(over):.2f} ×"))
    rows.append(
        Row("over the worst, at most", f"{max(c.over_worst for _, c in found):.2f} ×", "≥ 4.56 ×")
    )
    return rows


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


def policy(prior: Prior, pairs: int, seeds: list[int]) -> list[Row]:
    """The tree search on models and devices of families that no training has seen."""
    found: dict[str, list[Judged]] = {"network": [], "look-ahead": []}
    for i in range(pairs):
        name, on = worlds.world(i, unseen=True)
        for seed in seeds:
            for title, use in (("network", prior), ("look-ahead", look_ahead)):
                found[title].append(judged(on, use, seed))
        print(f"{name}: {found['network'][-1]}", file=sys.stderr)
    rows = []
    for title, all_of in found.items():
        soon = statistics.mean(j.better_at <= 50 for j in all_of)
        rows.append(
            Row(f"{title}: better than data parallel within 50 playouts", f"{soon:.1%}", "≥ 90 %")
        )
        by_seed = [all_of[i :: len(seeds)] for i in range(len(seeds))]
        sums = [sum(j.guided_at for j in part) / sum(j.even_at for j in part) for part in by_seed]
        figure = f"{statistics.mean(sums):.2f} ({', '.join(f'{x:.2f}' for x in sums)} by seed)"
        rows.append(
            Row(f"{title}: playouts to playouts of even chances, same cost", figure, "≤ 0.25")
        )
        ratios = [j.ratio for j in all_of]
        rows.append(Row(f"{title}: the same, median of pairs", f"{statistics.median(ratios):.2f}"))
        ahead = statistics.geometric_mean(j.gain / j.even_gain for j in all_of)
        rows.append(Row(f"{title}: step of even chances to its own, after 200", f"{ahead:.3f} ×"))
    return rows


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
    every = "tag,hap-8,hap-32,plain,random,wide,factors,speed,policy"
    only = set(words.get("--only", every).split(","))
    first, _, last = words.get("--seeds", "0").partition("-")
    seeds = list(range(int(first), int(last or first) + 1))
    planner = Placing(playouts=16, strokes=18_000, polish=3000) if quick else Placing()
    if "speed" in only:
        show("Placements a second", speed())
    if "policy" in only:
        weights = words.get("--weights")
        prior = Learned(read(Path(weights).read_bytes())) if weights else shipped()
        rows = policy(prior, int(words.get("--pairs", "40")), seeds)
        show("The tree search on unseen models and devices", rows)
    if "factors" in only:
        show("Factors", factors())
    found = fixed(planner, only, quick, seeds)
    for name, drawn_ones in (("random", topologies(10)), ("wide", wide(10))):
        if name in only:
            found += mixes(planner, drawn_ones, seeds)
    if found:
        show(
            "Placements: step; over plain data parallel / best / worst other method; search",
            [case.row(where) for where, case in found] + summary(found),
        )


if __name__ == "__main__":
    main()
