"""Buckets that are searched, measured beside those people use, on gloo ranks behind a slow link.

    python benchmarks/fusion_real.py                       all rows (needs Linux and root for links)
    python benchmarks/fusion_real.py mlp bert              some models
    python benchmarks/fusion_real.py --rounds 9 --steps 3
    python benchmarks/fusion_real.py --link 1gbit          all of them behind this one

For each model the ranks are profiled (when each gradient is there, how long ops, update and
messages take), a cut into buckets is searched, and then DistributedDataParallel runs with five
lists of buckets in turns: DDP's default (1 MiB, then 25), 1 MiB, 100 MiB, one bucket, and the cut.
A round's time is the shortest of its steps, so that other work on the machine counts less; a ratio
is taken round by round, and its median and quartiles are printed.

`to best` is the cut's step over that of the best of the four; `gain` is that of the cut over DDP's
default. A row holds where `to best` is at most +3 % and the predicted gain within 10 points.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from foretell.pytorch.tune.launch import TuneRequest, measure
from foretell.search.fusion.lanes import (
    DEFAULT,
    Profile,
    as_caps,
    even_cut,
    predicted_step,
    robust_cut,
)
from foretell.search.fusion.problem import Wire, measured_wire

SCRIPT = str(Path(__file__).with_name("fusion_real_models.py"))
SLOWER, OFF = 0.03, 0.10  # what a row may lose to the best, and how far a gain may be from its own
# Model, ranks, link. Links are slow enough for the wire to matter beside shared cores.
ROWS = (
    ("mlp", 2, "200mbit"), ("mlp", 4, "200mbit"), ("resnet", 2, "50mbit"), ("gpt", 2, "200mbit"),
    ("bert", 2, "50mbit"), ("vgg", 2, "50mbit"),
)  # fmt: skip
HEAD = (
    "model", "ranks", "link", "MB", "default", "1 MiB", "100 MiB", "one", "searched", "buckets",
    "to best %", "gain %", "predicted %", "holds",
)  # fmt: skip


@dataclass(frozen=True)
class Ways:
    """The cuts of one model: where buckets begin, by name."""

    cuts: dict[str, list[int]]
    profile: Profile
    wire: Wire

    @property
    def unique(self) -> list[list[int]]:
        """Each cut once: small models have one bucket either way."""
        return [list(c) for c in dict.fromkeys(tuple(cut) for cut in self.cuts.values())]

    def caps(self, cut: list[int]) -> tuple[float, ...]:
        """What DDP is given; nothing where it is left as it is."""
        return () if cut == self.cuts["default"] else as_caps(self.profile, cut)

    def step(self, name: str) -> float:
        """Predicted."""
        return predicted_step(self.profile, self.wire, self.cuts[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--link", help="in place of each row's own")
    given = parser.parse_args()
    rows = []
    for model, ranks, link in ROWS:
        if not given.models or model in given.models:
            rows.append(row(model, ranks, given.link or link, given.rounds, given.steps))
            print(" | ".join(map(str, rows[-1].values())), file=sys.stderr, flush=True)
    figures_of(rows, given.rounds, given.steps)


def row(model: str, ranks: int, link: str, rounds: int, steps: int) -> dict[str, object]:
    os.environ["FUSION_MODEL"] = model
    options = TuneRequest(SCRIPT, steps=8, rounds=rounds, device="cpu", network=link)
    ways = searched_ways(measure(options, ranks), ranks)
    tried = ways.unique
    caps = tuple(ways.caps(cut) for cut in tried)
    found = measure(replace(options, steps=steps, candidates=caps), ranks, timeout=1500.0)
    taken = [[min(took) for took in way] for way in found["rounds"]]
    times = {name: taken[tried.index(cut)] for name, cut in ways.cuts.items()}
    return compared(model, ranks, link, ways, times)


def searched_ways(found: dict[str, object], ranks: int) -> Ways:
    rows = sorted(found["gradients"], key=lambda g: g["ready_s"])
    ready, sizes = (np.array([g[key] for g in rows], float) for key in ("ready_s", "bytes"))
    profile = Profile(ready, sizes, found["compute_s"], found["update_s"])
    sent, took = np.array(found["wire"], float).T
    wire = measured_wire(sent, took, ranks)
    cuts = {"default": even_cut(profile, DEFAULT[1], DEFAULT[0]), "1 MiB": even_cut(profile, 1.0)}
    cuts |= {"100 MiB": even_cut(profile, 100.0), "one": [0], "searched": robust_cut(profile, wire)}
    return Ways(cuts, profile, wire)


def compared(
    model: str, ranks: int, link: str, ways: Ways, times: dict[str, list[float]]
) -> dict[str, object]:
    usual = [name for name in times if name != "searched"]
    best = min(usual, key=lambda name: statistics.median(times[name]))
    behind = [a / b - 1 for a, b in zip(times["searched"], times[best], strict=True)]
    gains = [a / b - 1 for a, b in zip(times["default"], times["searched"], strict=True)]
    predicted = ways.step("default") / ways.step("searched") - 1
    slow, off = statistics.median(behind), abs(statistics.median(gains) - predicted)
    return dict(zip(HEAD, (
        model, ranks, link, f"{ways.profile.sizes.sum() / 1e6:.1f}",
        *(f"{statistics.median(times[name]):.3f}" for name in (*usual, "searched")),
        len(ways.cuts["searched"]), spread(behind), spread(gains), f"{100 * predicted:+.1f}",
        "yes" if slow <= SLOWER and off <= OFF else "**no**",
    ), strict=True))  # fmt: skip


def spread(ratios: Sequence[float]) -> str:
    """The median, and the quartiles in brackets."""
    low, middle, high = (100 * q for q in statistics.quantiles(ratios, n=4, method="inclusive"))
    return f"{middle:+.1f} ({low:+.1f} … {high:+.1f})"


def figures_of(rows: list[dict[str, object]], rounds: int, steps: int) -> None:
    print("| " + " | ".join(HEAD) + " |\n|---" + "|--:" * (len(HEAD) - 1) + "|")
    for found in rows:
        print("| " + " | ".join(str(cell) for cell in found.values()) + " |")
    held = sum(r["holds"] == "yes" for r in rows)
    load = os.getloadavg()[0]
    print(
        f"\n{held} of {len(rows)} rows hold. Seconds a step; {rounds} rounds of {steps} steps in "
        f"turns, {os.cpu_count()} cores, load {load:.0f} at the end."
    )


if __name__ == "__main__":
    main()
