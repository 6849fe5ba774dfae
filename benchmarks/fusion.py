"""Joint op and tensor fusion: every baseline, the paper's search and ours, against the bounds.

    python benchmarks/fusion.py                    all clusters
    python benchmarks/fusion.py disco-a            one of them
    python benchmarks/fusion.py published          cluster A with the wire its paper measured

Seconds a step. `gain` is over the best baseline, (T − T_ours) / T_ours as in the paper's Table 1.
`bound` lets no gradient leave before it is there; `overlap` is the paper's full overlap, where
nothing waits for anything. Spaces of their own: `late` puts weight gradients off behind all else,
`sharded` reduces gradients to one owner each and gathers parameters while the next forward runs, as
FSDP does; `all` does both. The second `gain` is that of the best of them over the best baseline,
`to overl.` how far it is from full overlap. `needs` is after how many evaluations ours is as good
as the paper's search at its end (`evals`), `equal t.` how much longer its step is than ours when it
gets as much time. Batches are the largest that fit, in powers of two, on the paper's clusters.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np

from foretell.cluster import Cluster
from foretell.cluster import load as load_cluster
from foretell.search.fusion.backtrack import Backtrack, backtrack
from foretell.search.fusion.guided import Run, put_off
from foretell.search.fusion.planner import Found, Fusing
from foretell.search.fusion.problem import Problem
from foretell.search.fusion.score import Judge
from foretell.search.fusion.state import unfused
from foretell.search.fusion.wire import Wire
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
MORE = {
    "GPT-2": "gpt2",
    "Llama 1B": "llama:layers=16,hidden=2048,heads=32,seq=2048,vocab=32000,inner=5632",
}
# Samples of a rank where the machines have room for far more than anybody would train with.
SMALL = {"VGG-19": 32, "ResNet-50": 64, "Transformer": 64, "RNNLM": 64, "BERT": 32,
         "Reformer-like": 4, "GPT-2": 4, "Llama 1B": 1}  # fmt: skip
CLUSTERS = ("disco-a", "disco-b", "dgx-h100:nodes=4", "dgx-h200:nodes=2")
# Table 1 of the paper, per cent over the best baseline on A and B.
TABLE_1 = {
    "VGG-19": (8.6, 10.1), "ResNet-50": (12.5, 9.6), "Transformer": (26.7, 20.6),
    "RNNLM": (5.1, 8.6), "BERT": (18.5, 13.7), "Reformer-like": (13.4, 14.5),
}  # fmt: skip
# Figure 7 of the paper, read off: seconds of compute and all-reduce without fusion, and of the
# all-reduces of DisCo's own module.
FIGURE_7 = {
    "VGG-19": (0.82, 1.63, 1.56), "ResNet-50": (0.30, 0.11, 0.096),
    "Transformer": (0.62, 1.07, 0.90), "RNNLM": (0.88, 0.34, 0.28),
}  # fmt: skip
HEAD = (
    "model", "batch", "none", "ops", "grads", "both", "ddp", "ind+ddp", "paper", "ours", "bound",
    "gain %", "Table 1", "to bound %", "late", "sharded", "all", "gain %", "overlap",
    "to overl. %", "evals",
    "needs", "equal t.", "CPU s",
)  # fmt: skip


def main() -> None:
    asked = sys.argv[1:] or [*CLUSTERS, "published"]
    for name in asked:
        if name == "published":
            published()
        else:
            shown(name)


def shown(name: str) -> None:
    cluster = load_cluster(name)
    is_paper = name.startswith("disco")
    rows = []
    for model, spec in (PAPER | MORE).items():
        if is_paper and model == "Llama 1B":
            continue  # fp32 weights, gradients and moments alone are more than the device has
        dtype = "" if is_paper else "bf16"
        workload = sized(load(spec), cluster, 0 if is_paper else SMALL[model], dtype)
        published_gain = TABLE_1.get(model, (None, None))[name == "disco-b"] if is_paper else None
        rows.append(row(model, Fusing().problem(workload, cluster), workload.batch, published_gain))
        print(".", end="", file=sys.stderr, flush=True)
    print(f"\n{name}: {cluster.size} ranks of {cluster.devices[0].name}")
    told(rows)


def published() -> None:
    """The paper's regime: its measured wire, and batches that make its compute."""
    cluster = load_cluster("disco-a")
    rows = []
    for model, (compute, apart, together) in FIGURE_7.items():
        workload = load(PAPER[model])
        one = Fusing().problem(workload, cluster)
        workload = replace(workload, batch=max(1, round(workload.batch * compute / one.compute)))
        problem = Fusing().problem(workload, cluster)
        start = (apart - together) / len(problem.gradients)
        laws = np.array([[start, (together - start) / problem.sizes.sum(), 0.0]])
        fields = {n: getattr(problem, n) for n in Problem.__dataclass_fields__}
        slow = Problem(**fields | {"wire": Wire(("published",), laws, 12), "room": float("inf")})
        rows.append(row(model, slow, workload.batch, TABLE_1[model][0]))
    print("\ndisco-a with the wire and the compute of the paper's figure 7")
    told(rows)


def sized(workload: Workload, cluster: Cluster, batch: int, dtype: str) -> Workload:
    """The workload with its batch: as given, or the largest power of two that fits."""
    workload = replace(workload, dtype=dtype or workload.dtype)
    if batch:
        return replace(workload, batch=batch)
    fits = [1]
    while len(fits) < 12:
        problem = Fusing().problem(replace(workload, batch=fits[-1] * 2), cluster)
        if unfused(problem).held > 0.9 * problem.room:
            break
        fits.append(fits[-1] * 2)
    return replace(workload, batch=fits[-1])


def row(model: str, problem: Problem, batch: int, published_gain: float | None) -> list[object]:
    begun = time.process_time()
    ours = Fusing().search(problem)
    spent = time.process_time() - begun
    late, halves, every = (wider(problem, ours, *how) for how in ((0, 1), (1, 0), (1, 1)))
    paper = Run(Judge(problem), seconds=40.0)
    backtrack(paper, Backtrack())
    equal = Run(Judge(problem), seconds=ours.run.spent)
    backtrack(equal, Backtrack(patience=10**9))
    steps = [r.step for r in ours.baselines.values()]
    best = ours.best.step
    more = min(best, late, halves, every)
    overlap = ours.bounds.overlap
    return [
        model, batch, *(f"{s:.4g}" for s in steps), f"{paper.best.step:.4g}", f"{best:.4g}",
        f"{ours.bounds.bound:.4g}", f"{100 * (min(steps) / best - 1):.1f}",
        "" if published_gain is None else f"{published_gain:.1f}",
        f"{100 * (best / ours.bounds.bound - 1):.2f}", f"{late:.4g}",
        f"{halves:.4g}", f"{every:.4g}", f"{100 * (min(steps) / more - 1):.1f}",
        f"{overlap:.4g}",
        f"{100 * (more / overlap - 1):.1f}",
        paper.judge.evaluations, needed(ours, paper.best.step),
        f"{100 * (equal.best.step / best - 1):+.1f} %", f"{spent:.1f}",
    ]  # fmt: skip


def wider(problem: Problem, ours: Found, sharded: int, reorder: int) -> float:
    """The step of our kernels where parameters are gathered apart, weight gradients put off."""
    run = Run(Judge(problem, sharded=bool(sharded)))
    scored = run.see(run.judge.score(ours.best.fusion))
    if reorder:
        put_off(run, scored)
    return run.best.step


def needed(ours: Found, step: float) -> int:
    """After how many evaluations ours was as good, those of the baselines counted."""
    return next((many for many, _, s in ours.run.trace if s <= step), -1)


def told(rows: list[list[object]]) -> None:
    print("| " + " | ".join(HEAD) + " |\n|---" + "|--:" * (len(HEAD) - 1) + "|")
    for found in rows:
        print("| " + " | ".join(str(cell) for cell in found) + " |")
    gains, more, gaps = ([float(str(r[k])) for r in rows] for k in (11, 17, 13))
    print(
        f"mean gain {sum(gains) / len(gains):.1f} %, with more room {sum(more) / len(more):.1f} %; "
        f"furthest from the bound {max(gaps):.2f} %"
    )


if __name__ == "__main__":
    main()
