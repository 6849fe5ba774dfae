"""The joint search beside each planner of one axis, on language, vision and mixed cases.

    python benchmarks/joint.py [--cases N] [--only TEXT] [-o FILE]

Every answer is priced again by the function that `foretell predict` calls. A method that finds no
plan says so; CPU time and evaluations of each are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

from foretell.cluster import Cluster, load
from foretell.errors import ForetellError
from foretell.search.evaluate import repredicted
from foretell.search.planners import parse
from foretell.search.pooled import best_plan
from foretell.workload import load as load_workload

BOX = '[[node]]\ncount = {count}\ndevice = "{device}"\ndevices = {devices}\nnic = "{nic}"\n'
MIXED = {
    "a100+v100": [("a100-80", 2, 8, "infiniband-hdr"), ("v100-16", 2, 8, "infiniband-hdr")],
    "a100+v100+t4": [
        (d, 1, n, "ethernet-25g") for d, n in (("a100-80", 4), ("v100-16", 4), ("t4", 2))
    ],
    "h100+a100": [("h100", 4, 8, "infiniband-ndr"), ("a100-80", 4, 8, "infiniband-hdr")],
    "v100+p100": [("v100-32", 2, 4, "ethernet-25g"), ("p100-pcie", 2, 4, "ethernet-25g")],
}  # fmt: skip
SMALL = ("gpt:layers=24,hidden=1024,heads=16", "bert:batch=16", "vit_l_16:batch=16")
CASES = [
    ("gpt:layers=8,hidden=1024,heads=16", "dgx-a100"),
    ("gpt:layers=24,hidden=2048,heads=16", "dgx-1-v100:nodes=8"),
    ("gpt:layers=40,hidden=5120,heads=40", "dgx-a100:nodes=8"),
    ("llama:layers=32,hidden=4096,heads=32", "dgx-h100:nodes=2"),
    ("llama:layers=32,hidden=4096,heads=32", "a100-80:gpus=16"),
    ("llama:layers=32,hidden=4096,heads=32", "h100:gpus=64"),
    ("llama-3.1-8b", "h100:gpus=8"),
    ("llama-3.1-70b", "h100:gpus=64"),
    ("llama-3.1-70b", "h100:gpus=256"),
    ("llama-3.1-405b", "h100:gpus=1024"),
    ("mixtral-8x7b", "h100:gpus=64"),
    ("qwen3-30b-a3b", "h100:gpus=64"),
    ("deepseek-v3", "h100:gpus=1024"),
    ("bert:batch=16", "dgx-1-v100:nodes=2"),
    ("vit_l_16:batch=16", "dgx-a100:nodes=8"),
    ("swin_t:batch=32", "dgx-a100"),
    ("resnet50:batch=32", "dgx-1-v100:nodes=2"),
    ("vgg16:batch=32", "dgx-1-v100:nodes=2"),
    ("cosmoflow", "dgx-1-v100"),
    ("dlrm", "dgx-a100"),
    *[(model, name) for name in MIXED for model in SMALL],
    ("llama-3.1-8b", "h100+a100"),
    ("llama:layers=32,hidden=4096,heads=32", "a100+v100"),
]
METHODS = ("oracle", "placement", "fusion:evaluations=200")


def cluster_of(name: str, folder: Path) -> Cluster:
    """A preset, or one of the mixes above."""
    if name not in MIXED:
        return load(name)
    boxes = [BOX.format(device=d, count=c, devices=n, nic=nic) for d, c, n, nic in MIXED[name]]
    path = folder / f"{name}.toml"
    path.write_text(f'name = "{name}"\n' + "".join(boxes))
    return load(str(path))


def answer(planner: str, workload: Any, cluster: Cluster) -> dict[str, Any]:
    """What one planner finds, priced again, and what it cost."""
    began = time.process_time()
    try:
        found = best_plan(parse(planner), workload, cluster)
        again = repredicted(found, workload, cluster)
    except ForetellError as error:
        return {"error": error.message, "cpu_s": time.process_time() - began}
    return {
        "step_s": again.predicted,
        "plan": str(again.plan),
        "evaluations": found.evaluations,
        "cpu_s": time.process_time() - began,
    }


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=len(CASES))
    parser.add_argument("--only", default="")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model, on in [c for c in CASES if asked.only in " on ".join(c)][: asked.cases]:
            workload, cluster = load_workload(model), cluster_of(on, Path(folder))
            row = {"model": model, "cluster": on}
            row |= {m: answer(m, workload, cluster) for m in ("joint", *METHODS)}
            rows.append(row)
            print(_line(row), flush=True)
            if asked.output:
                asked.output.write_text(json.dumps(rows, indent=1))
    print(_summary(rows))


def _line(row: dict[str, Any]) -> str:
    cells = [f"{m.partition(':')[0]} {_step(row[m])}" for m in ("joint", *METHODS)]
    return f"{row['model'][:38]:38s} {row['cluster'][:20]:20s} " + "  ".join(cells)


def _step(found: dict[str, Any]) -> str:
    step = f"{found['step_s']:.4g} s" if "step_s" in found else "none"
    return f"{step:>10s} ({found['cpu_s']:.0f} CPU-s)"


def _summary(rows: list[dict[str, Any]]) -> str:
    """How the joint search does against the best of the others, in the geometric mean."""
    gains = []
    for row in rows:
        others = [row[m]["step_s"] for m in METHODS if "step_s" in row[m]]
        if others and "step_s" in row["joint"]:
            gains.append(min(others) / row["joint"]["step_s"])
    mean = math.exp(sum(map(math.log, gains)) / max(len(gains), 1))
    worse = sum(g < 1 - 1e-9 for g in gains)
    return f"{len(gains)} cases: {mean:.3f} × in the geometric mean, worse in {worse}"


if __name__ == "__main__":
    main()
