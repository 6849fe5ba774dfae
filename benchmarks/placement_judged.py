"""The tree search with and without its prior, on models and devices that no training has seen."""

import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

from table import Row

from foretell.search.placement.mcts import Prior, look_ahead
from foretell_lab.policy import worlds
from foretell_lab.policy.judge import MOST, Judged, judged

Play = Callable[[Callable[[Any], Any], list[Any]], Iterator[Any]]  # `map`, or that of processes


def judged_pair(what: tuple[int, list[int], Prior]) -> tuple[str, dict[str, list[Judged]]]:
    """One model and cluster that no training has seen, from each seed."""
    number, seeds, prior = what
    name, on = worlds.world(number, unseen=True)
    priors = {"network": prior, "look-ahead": look_ahead}
    return name, {title: [judged(on, use, s) for s in seeds] for title, use in priors.items()}


def policy(prior: Prior, pairs: int, seeds: list[int], play: Play) -> list[Row]:
    """The tree search on models and devices of families that no training has seen."""
    found: dict[str, list[list[Judged]]] = {"network": [], "look-ahead": []}
    for name, by_prior in play(judged_pair, [(i, seeds, prior) for i in range(pairs)]):
        for title, some in by_prior.items():
            found[title].append(some)
        print(f"{name}: {by_prior['network'][0]}", file=sys.stderr)
    return [row for title, some in found.items() for row in _judged_rows(title, some)]


def _judged_rows(title: str, by_pair: list[list[Judged]]) -> list[Row]:
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


def spread(values: list[float], form: str) -> str:
    """The middle of some ascending values, and the ends where they differ."""
    ends = [format(v, form) for v in (values[0], values[-1])]
    middle = format(statistics.median(values), form)
    return middle if ends[0] == ends[1] else f"{middle} ({ends[0]} to {ends[1]})"
