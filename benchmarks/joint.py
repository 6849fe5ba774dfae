"""The joint search beside planners of one axis and rivals of other systems, case by case.

    python benchmarks/joint.py [--evaluations N] [--only TEXT] [--seconds S] [-o FILE]
    python benchmarks/joint.py --earlier FILE [--reprice alpa,galvatron] [--workers 12] -o NEW
    python benchmarks/joint.py --print FILE

Every answer is priced by the function that `foretell predict` calls. All methods may simulate as
many plans (`--evaluations`), placements and FlexFlow's chain 60 times that, at a sixtieth each;
CPU time and evaluations of each are kept, and each has a process of its own. What a file has is not
asked again, so that a run can be cut, by `--seconds` or otherwise, and goes on where it stopped; a
method that finds nothing, raises or dies has that as its answer. `--print` prints the table and
the means of a file. With `--earlier` answers go to a new file: what they cost before says which are
asked first, and methods that `--reprice` names keep their plan, priced as of today (`repriced`).
`mixed` and `alike` as TEXT choose by machines; `--from` takes over the answers of another file.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from foretell.cluster import Cluster, load
from foretell.errors import ForetellError
from foretell.io import write_text
from foretell.plan import Plan
from foretell.predict import predict
from foretell.search.joint import OPS, op_count
from foretell.search.kit import (
    Planner,
    in_order,
    parse,
    priced,
    renamed,
    repredicted,
    searcher,
    silent,
)
from foretell.workload import Workload
from foretell.workload import load as load_workload
from foretell_lab.rivals import RIVALS
from foretell_lab.workers import answers, peak_mb

BOX = '[[node]]\ncount = {count}\ndevice = "{device}"\ndevices = {devices}\nnic = "{nic}"\n'
BOXES = {
    "a100+v100": [("a100-80", 2, 8, "infiniband-hdr"), ("v100-16", 2, 8, "infiniband-hdr")],
    "a100+v100+t4": [
        (d, 1, n, "ethernet-25g") for d, n in (("a100-80", 4), ("v100-16", 4), ("t4", 2))
    ],
    "h100+a100": [("h100", 4, 8, "infiniband-ndr"), ("a100-80", 4, 8, "infiniband-hdr")],
    "v100+p100": [("v100-32", 2, 4, "ethernet-25g"), ("p100-pcie", 2, 4, "ethernet-25g")],
    "h100+a100, 1024": [("h100", 64, 8, "infiniband-ndr"), ("a100-80", 64, 8, "infiniband-hdr")],
    "16 a100 + 16 v100": [("a100-80", 2, 8, "infiniband-hdr"), ("v100-32", 2, 8, "infiniband-hdr")],
    "a100, slow": [("a100-80", 4, 8, "ethernet-25g")],
    "a100-40, slow": [("a100-40", 8, 4, "ethernet-25g")],
    "v100, slow": [("v100-32", 4, 4, "ethernet-25g")],
    "h100, slow": [("h100", 8, 8, "ethernet-100g")],
}  # fmt: skip
MIXED = tuple(name for name in BOXES if "+" in name)
SMALL = ("gpt:layers=24,hidden=1024,heads=16", "bert:batch=16", "vit_l_16:batch=16")
GPT_2B, LLAMA_7B = "gpt:layers=24,hidden=2048,heads=16", "llama:layers=32,hidden=4096,heads=32"
CASES = [
    # the four rows on which commands once contradicted each other
    ("gpt:layers=8,hidden=1024,heads=16", "dgx-a100"),
    (GPT_2B, "dgx-1-v100:nodes=8"),
    ("gpt:layers=24,hidden=1024,heads=16,batch=8", "16 a100 + 16 v100"),
    (LLAMA_7B, "a100-80:gpus=16"),
    # mixed machines
    *[(model, name) for name in MIXED[:4] for model in SMALL],
    (f"{GPT_2B},batch=8", "a100+v100"),
    (f"{GPT_2B},batch=8", "v100+p100"),
    (f"{LLAMA_7B},batch=4", "a100+v100"),
    (f"{LLAMA_7B},batch=4", "h100+a100"),
    ("llama-3.1-8b:batch=8", "h100+a100"),
    ("t5-large:batch=8", "a100+v100"),
    # slow networks
    (GPT_2B, "v100, slow"),
    (f"{LLAMA_7B},batch=4", "a100, slow"),
    (f"{LLAMA_7B},batch=2", "a100-40, slow"),
    ("llama-3.1-8b:batch=2", "h100, slow"),
    ("bert:batch=16", "v100, slow"),
    ("vgg16:batch=32", "v100, slow"),
    # alike machines, fast networks
    ("gpt:layers=40,hidden=5120,heads=40", "dgx-a100:nodes=8"),
    (f"{LLAMA_7B},batch=8", "a100-40:gpus=16"),
    (LLAMA_7B, "h100:gpus=64"),
    ("llama-3.1-8b:batch=4", "h100:gpus=8"),
    ("llama-3.1-8b:batch=16", "a100-80:gpus=8"),
    ("llama-3.1-70b", "h100:gpus=64"),
    ("llama-3.1-70b:batch=4", "h100:gpus=32"),
    ("llama-3.1-70b", "a100-80:gpus=128"),
    ("mixtral-8x7b", "h100:gpus=64"),
    ("qwen3-30b-a3b", "h100:gpus=64"),
    ("t5-large:batch=16", "dgx-1-v100:nodes=2"),
    ("vit_l_16:batch=16", "dgx-a100:nodes=8"),
    ("swin_t:batch=32", "dgx-a100"),
    ("resnet50:batch=32", "dgx-1-v100:nodes=2"),
    ("vgg16:batch=32", "dgx-1-v100:nodes=2"),
    ("cosmoflow", "dgx-1-v100"),
    ("dlrm", "dgx-a100"),
    ("llama-3.1-405b", "h100:gpus=1024"),
    ("deepseek-v3", "h100:gpus=1024"),
    ("llama-3.1-70b", "h100+a100, 1024"),
]
KEPT = 2000  # characters of a plan that a row keeps
SINGLE = ("oracle", "placement", "fusion")
PLACED = ("hap", "flexflow", "tag", "heterog")  # read from the placement planner's comparison


def cluster_of(name: str, folder: Path) -> Cluster:
    """A preset, or one of the boxes above."""
    if name not in BOXES:
        return load(name)
    boxes = [BOX.format(device=d, count=c, devices=n, nic=nic) for d, c, n, nic in BOXES[name]]
    path = folder / f"{name.replace(' ', '-')}.toml"
    path.write_text(f'name = "{name}"\n' + "".join(boxes))
    return load(str(path))


def names(on: str) -> list[str]:
    """Every method that is asked about a cluster."""
    return ["joint", *SINGLE, *(name for name in RIVALS if name != "metis" or on in MIXED)]


def planner_of(name: str, workload: Workload, many: int) -> Planner:
    """A method with the budget that all have."""
    if name in RIVALS:
        return RIVALS[name](evaluations=many)
    climbs = many if op_count(workload) <= OPS * many else 1  # as much as the joint search lets it
    texts = {
        "joint": f"joint:evaluations={many}",
        "oracle": f"oracle:simulate={many}",
        "placement": f"placement:strokes={60 * many},polish={10 * many},proposals={60 * many}",
        "fusion": f"fusion:evaluations={climbs}",
    }
    return parse(texts[name])


def answer(planner: Planner, workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """What one planner finds, priced again, and what it cost."""
    began = time.process_time()
    try:
        ranks = in_order(cluster)
        found = searcher(planner, workload)(workload, cluster.subset(ranks), silent)
        found = replace(found, plan=renamed(found.plan, ranks, cluster))
        found = repredicted(found, priced(found.plan, workload, cluster))
    except ForetellError as error:
        return {"error": error.message, "cpu_s": time.process_time() - began}
    row = {
        "step_s": found.predicted,
        "plan": str(found.plan)[:KEPT],
        "evaluations": found.evaluations,
        "cpu_s": time.process_time() - began,
        "bound_s": found.bound,
        "peak_mb": peak_mb(),
    }
    if planner.name == "placement":
        row["baselines"] = {
            name: found.baselines[name] for name in PLACED if name in found.baselines
        }
    return row


def main() -> None:
    """Run the cases that a file lacks, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=100)
    parser.add_argument("--only", default="")
    parser.add_argument("--methods", default="", help="names with commas between; all where empty")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th case from the K-th on")
    parser.add_argument("--earlier", type=Path, help="a file of answers that were made before")
    parser.add_argument("--reprice", default="", help="methods that keep their earlier plan")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0, help="after that it is cut; never if 0")
    parser.add_argument("--from", dest="others", type=Path, help="a file whose answers are taken")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--print", dest="shown", type=Path)
    options = parser.parse_args()
    path = options.shown or options.output
    rows = _rows(path)
    if options.others:
        for name, row in _rows(options.others).items():
            rows[name] = rows.get(name, {}) | row
    elif not options.shown:
        _answer_all(rows, options)
    if options.output:
        write_text(options.output, json.dumps(rows, indent=1))
    print("\n".join([*map(_line, rows.values()), *summary(list(rows.values()))]))


def _rows(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text()) if path and path.is_file() else {}


def _answer_all(rows: dict[str, Any], options: Any) -> None:
    """Every answer that is asked for, kept as they come."""
    first, every = map(int, options.part.split("/"))
    mine = [c for c in CASES if _is_asked(c, options.only)][first - 1 :: every]
    earlier = _rows(options.earlier)
    questions = [one for case in mine for one in _questions(rows, earlier, case, options)]
    if options.workers > 1:
        questions.sort(key=lambda one: -one.had.get("cpu_s", 60.0))
    if questions:  # what all of them load is loaded once
        predict(Plan(dp=8), load_workload(CASES[0][0]), load("dgx-a100"))
    for one, found in answers(_answered, questions, options.workers, options.seconds):
        rows.setdefault(one.case, {"model": one.model, "cluster": one.on})[one.method] = found
        if options.output:
            write_text(options.output, json.dumps(rows, indent=1))
        what = found.get("step_s") or found["error"]
        print(one.case, one.method, what, f"{found.get('cpu_s', 0):.1f} CPU-s", flush=True)


class Question(NamedTuple):
    """One method asked about one case."""

    model: str
    on: str
    method: str
    evaluations: int
    reprices: bool
    had: dict[str, Any]  # its earlier answer

    @property
    def case(self) -> str:
        """The name of the case."""
        return f"{self.model} on {self.on}"


def _questions(
    rows: dict[str, Any], earlier: dict[str, Any], case: tuple[str, str], options: Any
) -> list[Question]:
    """What is asked about one case."""
    done, had = (some.get(" on ".join(case), {}) for some in (rows, earlier))
    chosen = options.methods.split(",") if options.methods else names(case[1])
    return [
        Question(
            *case, name, options.evaluations, name in options.reprice.split(","), had.get(name, {})
        )
        for name in names(case[1])
        if name in chosen and name not in done
    ]


def _answered(options: Question) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        workload, cluster = load_workload(options.model), cluster_of(options.on, Path(folder))
        if options.had and options.reprices:
            return repriced(options.had, workload, cluster)
        return answer(planner_of(options.method, workload, options.evaluations), workload, cluster)


def _is_asked(case: tuple[str, str], only: str) -> bool:
    if only in ("mixed", "alike"):
        return (case[1] in MIXED) == (only == "mixed")
    return only in " on ".join(case)


def repriced(found: dict[str, Any], workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """An answer with its plan priced as of today."""
    if len(found.get("plan", "")) in (0, KEPT):
        return found
    step = predict(Plan.parse(found["plan"]), workload, cluster, advises=False).step
    return found | {"step_s": step, "repriced": True}


def _steps(row: dict[str, Any], names: Any) -> dict[str, float]:
    """Seconds that methods of a row found, those inside the placement planner's among them."""
    result = {n: row[n]["step_s"] for n in names if "step_s" in row.get(n, {})}
    inside = row.get("placement", {}).get("baselines", {})
    return result | {n: inside[n] for n in names if n in inside}


def _line(row: dict[str, Any]) -> str:
    found = _steps(row, (*SINGLE, *RIVALS, *PLACED))
    joint = row.get("joint", {})
    step = joint.get("step_s", math.inf)
    best = min(found, key=lambda n: found[n]) if found else ""
    gap = f"gap {1 - (joint.get('bound_s') or 0) / step:.0%}" if step < math.inf else ""
    against = f"{found[best] / step:.3f} × {best}" if best and step < math.inf else "none"
    head = f"{row['model'][:38]:38s} {row['cluster'][:18]:18s} joint {step:9.4g} s"
    spent = ", ".join(f"{name} {_spent(row[name])}" for name in ("joint", *SINGLE, *RIVALS)
                      if name in row)  # fmt: skip
    return f"{head} ({gap}); {against}; evaluations and CPU-s: {spent}"


def _spent(found: dict[str, Any]) -> str:
    return f"{found.get('evaluations', 0)}/{found.get('cpu_s', 0):.0f}"


def _gains(rows: list[dict[str, Any]], names: Any) -> list[float]:
    """How much faster the joint search's plan is than the best of some, case by case."""
    gains = []
    for row in rows:
        found = _steps(row, names)
        if found and "step_s" in row.get("joint", {}):
            gains.append(min(found.values()) / row["joint"]["step_s"])
    return gains


def _mean(gains: list[float]) -> str:
    mean = math.exp(sum(map(math.log, gains)) / max(len(gains), 1))
    worse = sum(g < 1 - 1e-9 for g in gains)
    return f"{len(gains)} cases: {mean:.3f} × in the geometric mean, worse in {worse}"


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """How the joint search does against the best of the others, in the geometric mean."""
    unlike = [row for row in rows if row["cluster"] in MIXED]
    rivals = (*RIVALS, *PLACED)
    out = [
        f"over the best planner of one axis ({', '.join(SINGLE)}): {_mean(_gains(rows, SINGLE))}",
        f"over the best rival ({', '.join(rivals)}): {_mean(_gains(rows, rivals))}",
        f"over the best rival on mixed clusters: {_mean(_gains(unlike, rivals))}",
    ]
    return out + [f"over {n}: {_mean(_gains(rows, [n]))}" for n in (*SINGLE, *rivals)]


if __name__ == "__main__":
    main()
