"""Joint op and tensor fusion: every baseline, the paper's search and ours, against the bounds.

    python benchmarks/fusion.py                    all clusters
    python benchmarks/fusion.py disco-a            one of them
    python benchmarks/fusion.py published          cluster A with the wire its paper measured
    python benchmarks/fusion.py rivals             strong rivals at equal budgets, and an ablation

Seconds a step. Baselines, the paper's search (`paper`) and `ours`, which may put weight gradients
off, for gradients that are all-reduced; `sharded` is ours where gradients are reduced to one owner
each and parameters gathered while the next forward runs, as FSDP does, in buckets of its own.

`bound` lets no gradient leave before it is there, ops in the order they are issued (putting some
off is the way below it). `overlap` is the paper's full overlap, of all-reduced gradients with
nothing waiting for anything: max(seconds of the shortest kernels found, seconds of the wire for one
message of everything) + update. `o. sharded` is the same for sharded ones, where a rank updates its
share alone: sharded steps may be below the one and not below the other.

`gain` is that of the better of ours and sharded over the best baseline, (T − T_ours) / T_ours as in
the paper's Table 1 (its mean on that cluster for models it has not). A row holds by its gain, or
by a step at most 3 % above `overlap`. `needs` is after how many evaluations ours is as good as the
paper's search at its end (`evals`, states it played; a state met again is not counted), `equal t.`
how much longer the paper's step is than ours when it gets as much time. Batches are the largest
that fit, in powers of two, on the paper's clusters.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np

from foretell.cluster import Cluster
from foretell.cluster import load as load_cluster
from foretell.search.fusion.fused_step import Evaluator, bounds
from foretell.search.fusion.planner import (
    Backtrack,
    FusionPlanner,
    FusionResult,
    SearchRun,
    apply_bundles,
    backtrack,
    defer_gradients,
    hill_climb,
)
from foretell.search.fusion.planner import begin_backtrack as begun_at
from foretell.search.fusion.problem import Problem, Wire, from_workload
from foretell.search.fusion.state import Fusion, fitting_edges, fused, unfused
from foretell.workload import Workload, load

# The paper's six; hashed attention is no kernel here, so long plain blocks stand for a Reformer.
PAPER = {
    "VGG-19": "vgg19",
    "ResNet-50": "resnet50",
    "Transformer": "transformer",
    "RNNLM": "rnnlm",
    "BERT": "bert:head=pretrain",
    "Reformer-like": "gpt:layers=6,hidden=512,heads=8,seq=2048,vocab=320,dtype=fp32",
}
MORE = {"GPT-2": "gpt2"}
# One that fits the memory of the paper's devices in fp32 with its moments, and one that does not.
SMALL_LLAMA = "llama:layers=12,hidden=1024,heads=16,seq=1024,vocab=32000,inner=2816"
LLAMA = "llama:layers=16,hidden=2048,heads=32,seq=2048,vocab=32000,inner=5632"
# Samples of a rank where the machines have room for far more than anybody would train with.
SMALL = {"VGG-19": 32, "ResNet-50": 64, "Transformer": 64, "RNNLM": 64, "BERT": 32,
         "Reformer-like": 4, "GPT-2": 4, "Llama 1B": 1}  # fmt: skip
CLUSTERS = ("disco-a", "disco-b", "dgx-h100:nodes=4", "dgx-h200:nodes=4")
# Table 1 of the paper, per cent over the best baseline on A and B.
TABLE_1 = {
    "VGG-19": (8.6, 10.1), "ResNet-50": (12.5, 9.6), "Transformer": (26.7, 20.6),
    "RNNLM": (5.1, 8.6), "BERT": (18.5, 13.7), "Reformer-like": (13.4, 14.5),
}  # fmt: skip
MEAN = (14.1, 12.9)  # of Table 1
NEAR = 3.0  # per cent of the full overlap within which a row holds whatever it gains
FIFTH = 5  # evaluations of the paper's search for one of ours, at least
LIMIT = 60.0  # seconds of search a model
# Figure 7 of the paper, read off: seconds of compute and all-reduce without fusion, and of the
# all-reduces of DisCo's own module.
FIGURE_7 = {
    "VGG-19": (0.82, 1.63, 1.56), "ResNet-50": (0.30, 0.11, 0.096),
    "Transformer": (0.62, 1.07, 0.90), "RNNLM": (0.88, 0.34, 0.28),
}  # fmt: skip
HEAD = (
    "model", "batch", "none", "ops", "grads", "both", "ddp", "ind+ddp", "ind+dp", "paper", "ours",
    "bound", "sharded", "overlap", "o. sharded", "gain %", "Table 1", "to overlap %",
    "to o. sharded %", "holds by", "evals", "needs", "equal t.", "CPU s",
)  # fmt: skip


def main() -> None:
    options = sys.argv[1:] or [*CLUSTERS, "published", "rivals"]
    for name in options:
        if name == "published":
            published()
        elif name == "rivals":
            rivals()
        else:
            shown(name)


def shown(name: str) -> None:
    cluster = load_cluster(name)
    is_paper = name.startswith("disco")
    models = PAPER | MORE | {"Llama 0.2B": SMALL_LLAMA} if is_paper else PAPER | MORE
    models |= {} if is_paper else {"Llama 1B": LLAMA}
    rows = []
    for model, spec in models.items():
        dtype = "" if is_paper else "bf16"
        workload = sized(load(spec), cluster, 0 if is_paper else SMALL[model], dtype)
        wanted = TABLE_1.get(model, MEAN)[name == "disco-b"] if is_paper else None
        rows.append(row(model, FusionPlanner().problem(workload, cluster), workload.batch, wanted))
        print(".", end="", file=sys.stderr, flush=True)
    print(f"\n{name}: {cluster.size} ranks of {cluster.devices[0].name}\n")
    figures_of(rows)


def published() -> None:
    """The paper's regime: its measured wire, and batches that make its compute."""
    cluster = load_cluster("disco-a")
    rows = []
    for model, (compute, apart, together) in FIGURE_7.items():
        workload = load(PAPER[model])
        one = FusionPlanner().problem(workload, cluster)
        workload = replace(workload, batch=max(1, round(workload.batch * compute / one.compute)))
        problem = FusionPlanner().problem(workload, cluster)
        start = (apart - together) / len(problem.gradients)
        laws = np.array([[start, (together - start) / problem.sizes.sum(), 0.0]])
        fields = {n: getattr(problem, n) for n in Problem.__dataclass_fields__}
        slow = Problem(**fields | {"wire": Wire(("published",), laws, 12), "room": float("inf")})
        rows.append(row(model, slow, workload.batch, TABLE_1[model][0]))
    print("\ndisco-a with the wire and the compute of the paper's figure 7\n")
    figures_of(rows)


# Models that no constant of the search was chosen on, on machines from slow wires to fast ones.
CASES = (
    ("gpt:layers=6,hidden=512,heads=8,batch=4", "disco-a"), ("resnet50:batch=32", "disco-a"),
    ("vgg19:batch=16", "disco-a"), ("bert:head=pretrain,batch=16", "disco-b"),
    ("vit_l_16:batch=8", "disco-b"), ("rnnlm:batch=32", "disco-b"),
    ("transformer:batch=32", "a100-80:gpus=16"), ("gpt2:batch=4", "a100-80:gpus=16"),
    ("llama:layers=12,hidden=1024,heads=16,batch=2", "dgx-h100:nodes=2"),
    ("gpt:layers=24,hidden=2048,heads=16", "dgx-1-v100:nodes=8"),
)  # fmt: skip


def rivals() -> None:
    """Ours and parts of it against Inductor with the best buckets, a hill climb and the paper's."""
    print(
        "\n| case | ops | inductor + exact buckets | hill climb, as many evaluations | "
        "hill climb, as much CPU | paper, as much CPU | ours | bundles alone | formula prices | "
        "evaluations | CPU s |\n|---|" + "--:|" * 10
    )
    worse = 0
    for spec, name in CASES:
        workload, cluster = load(spec), load_cluster(name)
        problem = FusionPlanner().problem(workload, cluster)
        ours = FusionPlanner().search(problem)
        spent, many = ours.run.spent, ours.run.judge.evaluations
        plain = ours.baselines["inductor, best buckets"]
        equal = hill_climb(_judge(problem), many).step
        as_long = hill_climb(_judge(problem), 10**9, seconds=spent).step
        paper = SearchRun(_judge(problem), seconds=spent)
        papers = backtrack(paper, Backtrack(patience=10**9), begun_at(paper)).step
        bundles = SearchRun(_judge(problem))
        apply_bundles(bundles, bundles.see(plain), fitting_edges(problem))
        formula = FusionPlanner(learned=False).problem(workload, cluster)
        simple = _judge(problem).score(
            fusion_on(problem, FusionPlanner().search(formula).best.fusion)
        )
        steps = (plain.step, equal, as_long, papers, ours.best.step, bundles.best.step, simple.step)
        worse += ours.best.step > min(plain.step, equal, as_long, papers)
        cells = " | ".join(f"{1e3 * s:.4f}" for s in steps)
        print(f"| {spec} on {name} | {len(problem)} | {cells} | {many} | {spent:.2f} |", flush=True)
    print(f"\nms a step; ours is longer than a rival in {worse} of {len(CASES)}")


def _judge(problem: Problem) -> Evaluator:
    return Evaluator(problem, sharded=problem.zero == 2)


def fusion_on(problem: Problem, other: Fusion) -> Fusion:
    """The same groups and copies for a problem whose ops are priced otherwise."""
    return fused(problem, list(other.members.values()), np.flatnonzero(other.copied).tolist())


def sized(workload: Workload, cluster: Cluster, batch: int, dtype: str) -> Workload:
    """The workload with its batch: as given, or the largest power of two that fits."""
    workload = replace(workload, dtype=dtype or workload.dtype)
    if batch:
        return replace(workload, batch=batch)
    fits = [1]
    while len(fits) < 12:
        problem = from_workload(replace(workload, batch=fits[-1] * 2), cluster, learned=True)
        if unfused(problem).held > 0.9 * problem.room:
            break
        fits.append(fits[-1] * 2)
    return replace(workload, batch=fits[-1])


def row(model: str, problem: Problem, batch: int, wanted: float | None) -> dict[str, object]:
    begun = time.process_time()
    ours = FusionPlanner(reorder=True, seconds=LIMIT / 2).search(problem)
    halves = sharded(problem, ours)
    spent = time.process_time() - begun
    paper = SearchRun(Evaluator(problem), seconds=LIMIT)
    least = backtrack(paper, Backtrack(), begun_at(paper)).step
    equal = SearchRun(Evaluator(problem), seconds=ours.run.spent)
    as_long = backtrack(equal, Backtrack(patience=10**9), begun_at(equal)).step
    steps, best = [r.step for r in ours.baselines.values()], ours.best.step
    overlaps = ours.bounds.overlap, halves.bounds.overlap
    gain = 100 * (min(steps) / min(best, halves.best.step) - 1)
    gap, far = (100 * (min(best, halves.best.step) / overlap - 1) for overlap in overlaps)
    seconds = [*steps, least, best, ours.bounds.bound, halves.best.step, *overlaps]
    return dict(zip(HEAD, (
        model, batch, *(f"{s:.4g}" for s in seconds), f"{gain:.1f}",
        "" if wanted is None else f"{wanted:.1f}", f"{gap:+.1f}", f"{far:+.1f}",
        held_by(gain, wanted, gap),
        paper.judge.evaluations, needed(ours, least), f"{100 * (as_long / best - 1):+.1f} %",
        f"{spent:.1f}",
    ), strict=True))  # fmt: skip


def sharded(problem: Problem, ours: FusionResult) -> FusionResult:
    """The best where parameters are gathered apart: our kernels, weight gradients late or not."""
    run = SearchRun(Evaluator(problem, sharded=True))
    defer_gradients(run, run.see(run.judge.score(ours.best.fusion.put_off([]))))
    return FusionResult(run.best, ours.baselines, bounds(run.judge, run.shortest), run)


def held_by(gain: float, wanted: float | None, gap: float) -> str:
    """What makes a row hold: the gain of Table 1, the full overlap, or nothing."""
    ways = ["Table 1"] if wanted is not None and gain >= wanted else []
    return ", ".join([*ways, *(["overlap"] if gap <= NEAR else [])]) or "**none**"


def needed(ours: FusionResult, step: float) -> int:
    """After how many evaluations ours was as good, those of the baselines counted."""
    return next((many for many, _, s in ours.run.trace if s <= step), -1)


def figures_of(rows: list[dict[str, object]]) -> None:
    print("| " + " | ".join(HEAD) + " |\n|---" + "|--:" * (len(HEAD) - 1) + "|")
    for found in rows:
        print("| " + " | ".join(str(cell) for cell in found.values()) + " |")
    held = [r for r in rows if r["holds by"] != "**none**"]
    quick = [r for r in rows if 0 <= FIFTH * int(str(r["needs"])) <= int(str(r["evals"]))]
    mean = sum(float(str(r["gain %"])) for r in rows) / len(rows)
    print(
        f"\n{len(held)} of {len(rows)} rows hold ("
        f"{sum('Table 1' in str(r['holds by']) for r in rows)} by the paper's gain, "
        f"{sum('overlap' in str(r['holds by']) for r in rows)} within {NEAR:g} % of full overlap, "
        f"{sum(float(str(r['to o. sharded %'])) <= NEAR for r in rows)} of that of sharded steps); "
        f"mean gain {mean:.1f} %. Ours needs at most a fifth of the paper's evaluations in "
        f"{len(quick)} of {len(rows)}; the longest search took "
        f"{max(float(str(r['CPU s'])) for r in rows):.1f} CPU s."
    )


if __name__ == "__main__":
    main()
