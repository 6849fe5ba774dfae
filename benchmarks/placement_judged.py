"""The tree search with and without its prior, on models and devices that no training has seen."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from table import Row

from foretell.search.placement.planner import PlacementPlanner
from foretell.search.placement.search import Evaluator, Prior, look_ahead
from foretell_lab.policy import worlds
from foretell_lab.policy.judge import MOST, Evaluated, evaluated

Play = Callable[[Callable[[Any], Any], list[Any]], Iterator[Any]]  # `map`, or that of processes


def evaluated_pair(what: tuple[int, list[int], Prior]) -> tuple[str, dict[str, list[Evaluated]]]:
    """One model and cluster that no training has seen, from each seed."""
    number, seeds, prior = what
    name, on = worlds.world(number, unseen=True)
    priors = {"network": prior, "look-ahead": look_ahead}
    return name, {title: [evaluated(on, use, s) for s in seeds] for title, use in priors.items()}


def policy(prior: Prior, pairs: int, seeds: list[int], play: Play) -> list[Row]:
    """The tree search on models and devices of families that no training has seen."""
    found: dict[str, list[list[Evaluated]]] = {"network": [], "look-ahead": []}
    for name, by_prior in play(evaluated_pair, [(i, seeds, prior) for i in range(pairs)]):
        for title, some in by_prior.items():
            found[title].append(some)
        print(f"{name}: {by_prior['network'][0]}", file=sys.stderr)
    return [row for title, some in found.items() for row in _evaluated_rows(title, some)]


def _evaluated_rows(title: str, by_pair: list[list[Evaluated]]) -> list[Row]:
    every = [j for some in by_pair for j in some]
    soon = statistics.mean(j.better_at <= 50 for j in every)
    sums = sorted(
        sum(j.guided_at for j in part) / sum(j.even_at for j in part)
        for part in zip(*by_pair, strict=True)
    )
    simulated = sum(j.guided_simulated for j in every) / sum(j.even_simulated for j in every)
    missed = statistics.mean(j.guided_at > MOST for j in every)
    ahead = statistics.geometric_mean(j.ahead for j in every)
    figures = {
        "better than data parallel within 50 playouts": (f"{soon:.1%}", "≥ 90 %"),
        "playouts to those of even chances, same cost": (f"{spread(sums, '.2f')}", "≤ 0.25"),
        "placements simulated to those of even chances": (f"{simulated:.2f}", ""),
        "playouts, median of pairs": (f"{statistics.median(j.ratio for j in every):.2f}", ""),
        "same cost not reached": (f"{missed:.1%}", ""),
        "step of even chances to its own, after 200": (f"{ahead:.3f} ×", ""),
    }
    return [Row(f"{title}: {what}", *cells) for what, cells in figures.items()]


KEPT = Path(__file__).resolve().parent / "measured" / "placement_ablation.json"


def ablation(pairs: int, *, again: bool = False) -> list[Row]:
    """The whole search with the network, with even chances and without a tree, at equal CPU.

    On unseen pairs of model and cluster. Without a tree, annealing gets the strokes that the tree
    of the network would have cost. Answers are kept in `measured/placement_ablation.json`.
    """
    kept = json.loads(KEPT.read_text()) if KEPT.exists() and not again else {}
    for number in range(pairs):
        if str(number) not in kept:
            kept[str(number)] = _three_ways(number)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
            print(number, kept[str(number)], file=sys.stderr, flush=True)
    some = [kept[str(number)] for number in range(pairs)]
    return [row for way in ("even", "none") for row in _compared(some, way)]


def _compared(some: list[dict[str, Any]], way: str) -> list[Row]:
    title = {"even": "a tree of even chances", "none": "no tree, annealing for as long"}[way]
    ratios = [one[way]["step"] / one["network"]["step"] for one in some]
    cpu = sum(one[way]["cpu_s"] for one in some) / sum(one["network"]["cpu_s"] for one in some)
    better = sum(r < 1 - 1e-6 for r in ratios)
    worse, mean = sum(r > 1 + 1e-6 for r in ratios), statistics.geometric_mean(ratios)
    return [
        Row(f"{title}: step over that with the network", f"{mean:.4f} ×"),
        Row(f"{title}: shorter, equal, longer", f"{better}, {len(some) - better - worse}, {worse}"),
        Row(f"{title}: CPU over that with the network", f"{cpu:.2f} ×"),
    ]


def _three_ways(number: int) -> dict[str, Any]:
    name, on = worlds.world(number, unseen=True)
    planner = PlacementPlanner(playouts=200, strokes=12_000, polish=1500)
    found: dict[str, Any] = {"pair": name}
    for way, prior in (("network", "learned"), ("even", "even")):
        found[way] = _whole_search(on, replace(planner, prior=prior), tree=True)
    tree, whole = found["network"]["tree_cpu_s"], found["network"]["cpu_s"]
    strokes = round(planner.strokes * whole / max(whole - tree, 1e-3))
    found["none"] = _whole_search(on, replace(planner, strokes=strokes), tree=False)
    return found


def _whole_search(given: Evaluator, planner: PlacementPlanner, *, tree: bool) -> dict[str, float]:
    """The search behind `--with placement`, without its baselines."""
    on, ends, began = Evaluator(given.problem), list[Any](), time.process_time()
    starts = planner._starts(on, {})
    first = [planner._tree(on, starts, on.seconds(starts[0]))[0]] if tree else []
    spent = time.process_time() - began
    planner._searched(on, [*first, *starts], lambda what, value: None, ends)
    return {
        "step": min(end.seconds for end in ends),
        "cpu_s": round(time.process_time() - began, 2),
        "tree_cpu_s": round(spent, 2),
    }


def spread(values: list[float], form: str) -> str:
    """The middle of some ascending values, and the ends where they differ."""
    ends = [format(v, form) for v in (values[0], values[-1])]
    middle = format(statistics.median(values), form)
    return middle if ends[0] == ends[1] else f"{middle} ({ends[0]} to {ends[1]})"
