"""Fit the constants of every class of link to measured collectives; write them; print the errors.

    python benchmarks/fit_collectives.py [../shared/truth]

writes `cost/tables/collective.toml` (links), `validate/tables/collective_clocks.toml` (what each
source's way of timing adds) and `validate/tables/collective_held_out.csv`: the errors on group
sizes, ranges of sizes and whole systems that were left out of a fit made for that purpose.
The stated spread of a class is that of errors on left-out systems and group sizes (twice what the
fit left where it was measured on one of each), so that intervals hold for what the fit never saw.
Run again on the same files it writes the same files.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from collective_fit import (
    CLASSES,
    Floats,
    Table,
    fit,
    is_well_chosen,
    links,
    outermost,
    points,
    seconds,
)

from foretell.cost.collective import LARGE, TEN_TO_NINETY, Link
from foretell_lab.validate.collective_runs import Run
from foretell_lab.validate.collectives import (
    FOLDS,
    SIZES,
    Clock,
    Key,
    accuracy,
    clock_of,
    lines,
    measured,
    summary,
)

SOURCE = Path(__file__).resolve().parent.parent / "src" / "foretell"
TABLES = SOURCE.parents[1] / "lab" / "src" / "foretell_lab" / "validate" / "tables"
FAMILY = {"send": "send", "all_to_all": "direct", "gather": "direct", "scatter": "direct"}
RANGES = ((0, 1 << 16), (1 << 16, 1 << 22), (1 << 22, 1 << 26), (1 << 26, 1 << 60))
# Ranks of one machine without GPUs: gloo's ring over TCP on the loopback device. Not fitted here:
# 195 µs and 2.6 GB/s for two processes are what pull request 199 of meta-pytorch/torchft prints.
GLOO = """\
[link.loopback]
kind = "loopback"
bandwidth = 3e9
source = "gloo all_reduce over TCP on one host, meta-pytorch/torchft pull request 199; calibrate"
launch = 7.5e-05
simple = { start = 0.0, hop = 6e-05, efficiency = 0.87 }
direct = { start = 0.0, hop = 6e-05, efficiency = 0.87 }
send = { start = 0.0, hop = 6e-05, efficiency = 0.87 }
sigma = { ring = [0.5, 0.5], direct = [0.5, 0.5], send = [0.5, 0.5] }
"""
MICRO = np.arange(1.0, 121.0) * 1e-6  # the floors and delays that are tried
LEAST, MOST = 0.03, 1.0  # bounds of a stated spread: no model of a shared machine is surer than 3 %
ALONE = 0.15  # at least this where a class was measured on one system: another will differ
UNSEEN = 0.4  # where it was not measured at all
HALF_SEEN = 0.2  # below 1 MiB, where it was measured only from there
SEEN = "seen"  # in place of what was left out: nothing was
FAMILIES = ("ring", "direct", "send")
Sigmas = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Model:
    """Everything one fit found."""

    links: Mapping[str, Link]
    clocks: Mapping[str, Clock]
    tables: Mapping[str, Table]
    runs: list[Run]

    def reads(self, run: Run) -> Floats:
        return clock_of(run, self.clocks).reads(seconds(run, run.bytes, self.links))


def model(runs: list[Run]) -> Model:
    """Links first, from what needs no clock, then the clocks over them."""
    tables = fit([p for p in map(points, fitted(runs)) if len(p.bytes)])
    known = links(tables)
    return Model(known, {"loop": Clock(), **clocks(runs, known)}, tables, runs)


def fitted(runs: Iterable[Run]) -> list[Run]:
    """Without single calls from Python, which tell of the host, and runs NCCL chose badly for."""
    return [run for run in runs if run.clock != "call" and is_well_chosen(run)]


def clocks(runs: list[Run], known: Mapping[str, Link]) -> dict[str, Clock]:
    """The floor or delay of each clock that brings prices nearest to what it showed.

    `kernel` is what a machine nobody timed gets: the middle of the others.
    """
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.clock != "loop" and run.nodes == 1 and (run.bytes < LARGE).any():
            groups[run.clock].append(run)
    found = {"call": Clock(delay=1e-6)}
    for name, mine in groups.items():
        tries = [Clock(delay=t) if name == "call" else Clock(floor=t) for t in MICRO]
        found[name] = min(tries, key=partial(_miss, runs=mine, known=known))
    floors = [clock.floor for name, clock in found.items() if name != "call"]
    return found | {"kernel": Clock(floor=float(np.median(floors)) if floors else 0.0)}


def _miss(clock: Clock, runs: list[Run], known: Mapping[str, Link]) -> float:
    """The mean over runs and size classes of the median error, where the clock counts."""
    errors = []
    for run in runs:
        off = np.abs(clock.reads(seconds(run, run.bytes, known)) / run.seconds - 1)
        for below in (True, False):
            rows = clock.blurs(run.bytes) & ((run.bytes < LARGE) == below)
            errors += [np.median(off[rows])] if rows.any() else []
    return float(np.mean(errors))


def folds(runs: list[Run]) -> Iterator[tuple[str, list[Run], list[Run]]]:
    """What was left out, the rest, and what was left out of it: to be priced by the rest's fit."""
    for ranks in sorted({run.ranks for run in runs}):
        yield "ranks", *_split(runs, [run.ranks == ranks for run in runs])
    for system in sorted({(run.source, run.system) for run in runs}):
        yield "system", *_split(runs, [(run.source, run.system) == system for run in runs])
    for low, high in RANGES:
        inside = [_cut(run, low, high) for run in runs]
        outside = [_cut(run, low, high, keep=False) for run in runs]
        yield "sizes", [r for r in outside if len(r.bytes)], [r for r in inside if len(r.bytes)]


def _split(runs: list[Run], out: list[bool]) -> tuple[list[Run], list[Run]]:
    pairs = list(zip(runs, out, strict=True))
    return [run for run, is_out in pairs if not is_out], [run for run, is_out in pairs if is_out]


def _cut(run: Run, low: float, high: float, keep: bool = True) -> Run:
    rows = ((run.bytes >= low) & (run.bytes < high)) == keep
    return run.at(rows)


LeftOut = dict[str, list[tuple[Run, Floats]]]


def left_out(runs: list[Run]) -> LeftOut:
    """ln(measured/priced) of every row under a fit that did not see it, by what was left out."""
    found: LeftOut = defaultdict(list)
    for fold, rest, out in folds(runs):
        trial = model(rest)
        found[fold] += [(run, np.log(run.seconds / trial.reads(run))) for run in out]
        print(f"fitted without some {fold}: {len(out)} runs left out", file=sys.stderr)
    return found


def spreads(found: Model, residuals: LeftOut) -> dict[str, Sigmas]:
    """The stated spread of every class, for each family of ops, below and from 1 MiB."""
    return {
        spec.name: {f: _spread(spec.name, f, found, residuals) for f in FAMILIES}
        for spec in CLASSES
    }


def _is_of(run: Run, name: str, family: str, found: Model) -> bool:
    is_family = FAMILY.get(run.op, "ring") == family and run.clock != "call"
    return is_family and outermost(run, found.links) == name


def _spread(name: str, family: str, found: Model, residuals: LeftOut) -> tuple[float, float]:
    """Below 1 MiB only loops count: a single kernel waits for others, its clock's spread."""
    small: LeftOut = defaultdict(list)
    large: LeftOut = defaultdict(list)
    for fold, parts in residuals.items():
        mine = [part for part in parts if _is_of(part[0], name, family, found)]
        small[fold] = [_where(part, below=True) for part in mine if part[0].clock == "loop"]
        large[fold] = [_where(part, below=False) for part in mine]
    low, high = _hardest(small), _hardest(large)
    return low or (max(high, HALF_SEEN) if high else UNSEEN), high or low or UNSEEN


def _where(part: tuple[Run, Floats], below: bool) -> tuple[Run, Floats]:
    run, off = part
    rows = (run.bytes < LARGE) == below
    return run.at(rows), off[rows]


def _hardest(folds: LeftOut) -> float:
    """The most that other group sizes and other systems show, or twice what a fit left."""
    seen = [run for run, off in folds["system"] if len(off)]
    alone = len({(run.source, run.system) for run in seen}) == 1
    tests = [] if alone else ["system"]
    tests += ["ranks"] if len({run.ranks for run in seen}) > 1 else []
    sigmas = [_sigma(_pool(folds[test])) for test in tests] or [2 * _sigma(_pool(folds[SEEN]))]
    return max(*sigmas, ALONE if alone else 0.0)


def _pool(parts: list[tuple[Run, Floats]]) -> Floats:
    return np.concatenate([*(_some(off) for _, off in parts), np.zeros(0)])


def _some(values: Floats) -> Floats:
    """At most two hundred, evenly taken, so that runs of many sizes do not outvote the others."""
    return values[:: max(1, len(values) // 200)]


def _sigma(residuals: Floats) -> float:
    """The sigma whose 80 % interval holds four of five; 0 where there is nothing to go by."""
    if not len(residuals):
        return 0.0
    return float(np.clip(np.quantile(np.abs(residuals), 0.8) / TEN_TO_NINETY, LEAST, MOST))


def clock_spreads(found: Model, sigmas: Mapping[str, Sigmas]) -> Model:
    """The same model, its clocks knowing what they add to the spread."""
    clocks = dict(found.clocks)
    for name in clocks.keys() - {"loop"}:
        parts = list(_blurred(found, name, sigmas))
        total = _sigma(np.concatenate([_some(off) for off, _ in parts]))
        own = float(np.median([sigma for _, sigma in parts]))
        clocks[name] = replace(clocks[name], sigma=max(0.0, total**2 - own**2) ** 0.5)
    return replace(found, clocks=clocks)


def _blurred(
    found: Model, name: str, sigmas: Mapping[str, Sigmas]
) -> Iterator[tuple[Floats, float]]:
    """The residuals of each run where its clock counts, and what its link states for them."""
    for run in found.runs:
        rows = clock_of(run, found.clocks).blurs(run.bytes)
        if run.clock.startswith(name) and run.nodes == 1 and rows.any():
            stated = sigmas[outermost(run, found.links)][FAMILY.get(run.op, "ring")]
            off = np.log(run.seconds / found.reads(run))
            yield off[rows], stated[bool((run.bytes[rows] >= LARGE).mean() > 0.5)]


def covered(found: Model, sigmas: Mapping[str, Sigmas], parts: list[tuple[Run, Floats]]) -> float:
    """The share of left-out rows inside the interval that is stated for them, every run alike."""
    shares = []
    for run, off in parts:
        clock = clock_of(run, found.clocks)
        low, high = sigmas[outermost(run, found.links)][FAMILY.get(run.op, "ring")]
        sigma = np.hypot(
            np.where(run.bytes < LARGE, low, high), clock.sigma * clock.blurs(run.bytes)
        )
        shares.append(np.mean(np.abs(off) <= TEN_TO_NINETY * sigma))
    return float(np.mean(shares))


def write(found: Model, sigmas: Mapping[str, Sigmas]) -> None:
    """The tables of links and clocks, with the source of each."""
    text = [
        "# Written by benchmarks/fit_collectives.py from measured collectives: do not edit.",
        "",
    ]
    for spec in CLASSES:
        text += [
            f"[link.{spec.name}]",
            f'kind = "{spec.kind}"',
            f"bandwidth = {spec.bandwidth:.4g}",
        ]
        text += [f'source = "{spec.source}"']
        text += [f"{key} = {_toml(value)}" for key, value in found.tables[spec.name].items()]
        pairs = (f"{f} = [{low:.3g}, {high:.3g}]" for f, (low, high) in sigmas[spec.name].items())
        text += [f"sigma = {{ {', '.join(pairs)} }}", ""]
    (SOURCE / "cost" / "tables" / "collective.toml").write_text("\n".join(text) + "\n" + GLOO)
    text = ["# Written by benchmarks/fit_collectives.py: what each way of timing adds, in seconds."]
    for name, clock in sorted(found.clocks.items()):
        if name != "loop":
            values = (
                f"floor = {clock.floor:.3g}\ndelay = {clock.delay:.3g}\nsigma = {clock.sigma:.3g}"
            )
            text += ["", f"[{name}]", values]
    (TABLES / "collective_clocks.toml").write_text("\n".join(text) + "\n")


def _toml(value: float | Mapping[str, float]) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(v)}' for key, v in value.items())} }}"
    return f"{value:.4g}" if "e" in f"{value:.4g}" or "." in f"{value:.4g}" else f"{value:.4g}.0"


def write_held_out(residuals: LeftOut) -> None:
    """The median error of every group under fits that did not see it."""
    pools: dict[Key, dict[str, list[Floats]]] = defaultdict(lambda: defaultdict(list))
    for fold in FOLDS:
        for run, off in residuals[fold]:
            for size, rows in zip(SIZES, (run.bytes < LARGE, run.bytes >= LARGE), strict=True):
                key = (run.source, run.system, run.op, run.per_node, run.nodes, size)
                pools[key][fold].append(np.abs(np.exp(-off[rows]) - 1))
    with (TABLES / "collective_held_out.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        folds = (f"without_{fold}" for fold in FOLDS)
        table.writerow(("source", "system", "op", "per_node", "nodes", "size", *folds))
        for group, by_fold in sorted(pools.items()):
            table.writerow((*group, *(_median(by_fold.get(fold, [])) for fold in FOLDS)))


def _median(parts: list[Floats]) -> str:
    pool = np.concatenate([*parts, np.zeros(0)])
    return f"{np.median(pool):.4f}" if len(pool) else ""


def main(truth: Path) -> None:
    runs = measured(truth)
    for run in runs:
        if not is_well_chosen(run):
            print(f"not fitted: {run.system} {run.op} {run.per_node}×{run.nodes}", file=sys.stderr)
    residuals = left_out(runs)
    found = model(runs)
    residuals[SEEN] = [(run, np.log(run.seconds / found.reads(run))) for run in runs]
    sigmas = spreads(found, residuals)
    found = clock_spreads(found, sigmas)
    write(found, sigmas)
    write_held_out(residuals)
    errors = accuracy(truth)
    print("\n".join([*lines(errors), "", *summary(errors), ""]))
    for fold in FOLDS:
        share = covered(found, sigmas, residuals[fold])
        print(f"inside the 80 % interval when fitted without the {fold}: {share:.0%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE.parents[2] / "shared" / "truth")
