"""What the search for a plan takes: large questions, placements a second, fusing ten thousand ops.

    python benchmarks/plans.py

CPU seconds and memory of a fresh process each, one after the other; steps as `foretell predict`
prices them.
"""

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from joint import LLAMA_7B, answer, cluster_of
from table import Row, show

from foretell.cluster import load as machines
from foretell.search.joint import op_count
from foretell.search.kit import parse
from foretell.search.placement.planner import drawn
from foretell.search.placement.problem import Placement, actions, problem
from foretell.search.placement.search import Evaluator
from foretell.workload import load
from foretell_lab.workers import answers

DEEP = "gpt:layers=255,hidden=512,heads=8,seq=512,batch=4"
QUESTIONS = (  # what, model, cluster, planner, bar
    ("Llama 7B on 64 H100", LLAMA_7B, "h100:gpus=64", "joint", "≤ 10 CPU-s"),
    ("Llama 405B on 1,024 H100", "llama-3.1-405b", "h100:gpus=1024", "joint", "≤ 60 CPU-s, ≤ 1 GB"),
    ("Llama 70B on 512 H100 + 512 A100", "llama-3.1-70b", "h100+a100, 1024", "joint", "≤ 60 CPU-s"),
    (f"fusing {op_count(load(DEEP)):,} ops", DEEP, "dgx-a100", "fusion", "≤ 20 CPU-s"),
)
MODELS = ("vgg19:batch=8", "bert_large:batch=2", "resnet101:batch=8")


def rows() -> list[Row]:
    """The questions one after the other, then placements a second on 64 ranks."""
    found = answers(_answered, QUESTIONS)
    return [*(_row(options, one) for options, one in found), *map(_speed, MODELS)]


def _answered(options: tuple[str, ...]) -> dict[str, Any]:
    _, model, on, planner, _ = options
    with tempfile.TemporaryDirectory() as folder:
        return answer(parse(planner), load(model), cluster_of(on, Path(folder)))


def _row(options: tuple[str, ...], one: dict[str, Any]) -> Row:
    gap = f", gap {1 - one['bound_s'] / one['step_s']:.0%}" if one["bound_s"] else ""
    result = f"{one['cpu_s']:.1f} CPU-s, {one['peak_mb']:.0f} MB, {one['step_s']:.4g} s{gap}"
    return Row(f"{options[0]}, {one['evaluations']:,} plans", result, options[4])


def _speed(text: str) -> Row:
    """Placements a CPU second on 64 ranks: every group for itself, and runs of groups."""
    on, draw = problem(load(text), machines("dgx-1-v100:nodes=8")), random.Random(0)
    choices = [actions(on, g) for g in range(len(on.groups))]
    apart = [Placement(tuple(map(draw.choice, choices))) for _ in range(2000)]
    rates = [f"{_rate(Evaluator(on), some):,.0f}" for some in (apart, drawn(on, 4000, 1))]
    return Row(f"{text} placed on 64 ranks", f"{' to '.join(rates)} a CPU-s", "≥ 2,000")


def _rate(on: Evaluator, some: list[Placement]) -> float:
    on.many(some[:2])  # what is loaded or built at the first use
    before, began = on.evaluations, time.process_time()
    on.many(some[2:])
    return (on.evaluations - before) / (time.process_time() - began)


if __name__ == "__main__":
    show("Searching plans", rows())
