"""What-ifs of papers beside the same changes made and timed by `paper_steps.py`.

    python benchmarks/paper_rows.py [--prices PRICES.json]

Reads benchmarks/measured/papers: a trace of each plain step, the measured rows, the two clusters
whose networks were emulated. `--prices` writes what messages take on those clusters, which the
emulation keeps to: so it is all but the price of a message that is compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretell.advise import Step
from foretell.baseline import unprofiled
from foretell.cluster import Cluster, load
from foretell.trace import read
from foretell.whatif import applied, parse
from foretell.whatif.blueconnect import _across
from foretell.whatif.collective_cost import Wires
from foretell.whatif.parameter_server import _link

FOLDER = Path(__file__).parent / "measured" / "papers"
NETWORKS = {"thin": 4, "thick": 8}  # ranks
INSIDE = 4  # ranks of a node of `thick`
EPILOGUES = ("vgg16",)  # models of which ReLUs were put into epilogues


def specs(model: str, variant: str) -> tuple[str, ...]:
    """What a measured variant is called here."""
    way, _, net = variant.partition("@")
    if not net:
        is_joined = way == "metaflow" and model not in EPILOGUES
        return (f"{way}:epilogue=no" if is_joined else way,)
    ranks = f"ranks={NETWORKS[net]},skew=0"  # the emulated ranks are all alike
    if way in ("parameter-server", "p3"):
        return (f"{way}:{ranks}",)
    first = f"data-parallel:{ranks}"
    return (first,) if way == "data-parallel" else (first, way)


@dataclass(frozen=True)
class Row:
    """One measured variant beside what was predicted."""

    model: str
    variant: str
    before: float
    low: float
    high: float
    predicted: float
    bounds: tuple[float, float]

    @property
    def error(self) -> float:
        """Relative, from the nearer of two measurements."""
        return self.predicted / min(max(self.predicted, self.low), self.high) - 1

    @property
    def is_held(self) -> bool:
        return self.bounds[0] <= self.high and self.low <= self.bounds[1]


def rows() -> Iterator[Row]:
    """Every measured row, predicted."""
    truth: list[dict[str, Any]] = json.loads((FOLDER / "h200" / "truth.json").read_text())["rows"]
    base = {r["model"]: r["median_ms"] / 1e3 for r in truth if r["variant"] == "base"}
    for model, real in base.items():
        known = unprofiled(read(FOLDER / "h200" / f"{model}.base.json.gz"), real)
        for row in (r for r in truth if r["model"] == model and r["variant"] != "base"):
            step = Step(known.graph, cluster(row["variant"].partition("@")[2]), known)
            changes = [parse(s) for s in specs(model, row["variant"])]
            after = applied(changes, step.graph, step.setting)
            low, high = (row[k] / 1e3 for k in ("low_ms", "high_ms"))
            yield Row(
                model, row["variant"], real, low, high, step.predicted(after),
                tuple(step.interval(after, changes)),
            )  # fmt: skip


def cluster(net: str) -> Cluster | None:
    return load(str(FOLDER / f"{net}.toml")) if net else None


def prices() -> dict[str, Any]:
    """What messages take on the emulated clusters, by their bytes."""
    found: dict[str, Any] = {}
    for net, ranks in NETWORKS.items():
        wires, group, sizes = Wires(cluster(net)), tuple(range(ranks)), np.geomspace(1e3, 1e9, 61)
        one: dict[str, Any] = {"ranks": ranks, "bytes": sizes.tolist()}
        for op in ("all_reduce", "all_gather"):
            one[op] = wires.seconds(op, sizes, group).tolist()
        one["link"] = list(_link(wires, group))
        if ranks > INSIDE:
            for op in ("reduce_scatter", "all_gather"):
                one[f"{op} inside"] = wires.seconds(op, sizes, group[:INSIDE]).tolist()
            one["all_reduce between"] = _across(wires, sizes, group, INSIDE).tolist()
        found[net] = one
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--prices", type=Path)
    given = asked.parse_args()
    if given.prices:
        given.prices.write_text(json.dumps(prices()))
        return
    found = list(rows())
    for r in found:
        print(
            f"{r.model:12} {r.variant:24} {1e3 * r.before:6.1f} → {1e3 * r.low:6.1f}–"
            f"{1e3 * r.high:6.1f} ms, predicted {1e3 * r.predicted:6.1f} {r.error:+6.1%}"
            f"{'' if r.is_held else ' *'}"
        )
    ways = sorted({r.variant.partition("@")[0] for r in found})
    for way in [*ways, ""]:
        mine = [r for r in found if r.variant.partition("@")[0] == way or not way]
        errors = np.abs([r.error for r in mine])
        print(
            f"{way or 'all':24} {len(mine):3} rows, median {np.median(errors):5.1%}, worst "
            f"{errors.max():5.1%}, in the interval {np.mean([r.is_held for r in mine]):4.0%}"
        )


if __name__ == "__main__":
    main()
