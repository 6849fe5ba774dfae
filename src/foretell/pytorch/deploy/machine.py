"""The machine at hand: what is known of it from run to run.

Seconds of ops and factors on prices are kept in one file a machine (processor, cores, threads of a
rank, ranks, versions of Python and torch) in `$XDG_CACHE_HOME/foretell/machines`: another machine,
or another torch, begins anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foretell.cost.price import TimedOp
from foretell.pytorch.deploy import run_files

SPREAD = tomllib.loads((Path(__file__).parent / "spread.toml").read_text())
PRIOR = {name: float(value) for name, value in SPREAD["prior"].items()}
NOISE = float(SPREAD["noise"]["run"])
_KEPT = 20_000  # ops
_OLD = 0.8  # weight of what was learned before, at each run


@dataclass(frozen=True)
class Learned:
    """A factor on prices, in logarithms, weighed by the runs that taught it."""

    total: float = 0.0
    weight: float = 0.0
    runs: int = 0

    def value(self, prior: float) -> float:
        """The factor, nearer to 1 the fewer runs have taught it; `prior`: how far it may be."""
        return math.exp(self.total / (self.weight + (NOISE / prior) ** 2))

    def with_run(self, ratio: float, share: float = 1.0) -> Learned:
        """The factor after one more run, where something took `ratio` times as long as priced.

        `share` of a step it was priced at: what is found by leaving out the rest has its noise.
        """
        if not 0.01 < ratio < 100:
            return self
        weight = min(share, 1.0) ** 2
        return Learned(
            _OLD * self.total + weight * math.log(ratio),
            _OLD * self.weight + weight,
            self.runs + 1,
        )


@dataclass(frozen=True)
class Machine:
    """Seconds of ops on one machine without its load, and what runs have taught."""

    path: Path
    facts: Mapping[str, Any]
    launch: float = 0.0  # seconds that autograd and the dispatcher add to an op; 0: not timed
    seconds: Mapping[TimedOp, float] = field(default_factory=dict)
    learned: Mapping[str, Learned] = field(default_factory=dict)
    pace: Mapping[str, float] = field(default_factory=dict)  # of the host, by GPU and format

    def factor(self, name: str) -> float:
        """How many times as long as priced something takes here."""
        prior = PRIOR.get(name, PRIOR["family"])
        return self.learned.get(name, Learned()).value(prior)

    def with_ops(self, seconds: Mapping[TimedOp, float], launch: float) -> Machine:
        """The machine with more ops timed."""
        whole = dict(self.seconds) | dict(seconds)
        return replace(self, seconds=dict(list(whole.items())[-_KEPT:]), launch=launch)

    def with_pace(self, name: str, pace: float) -> Machine:
        """The machine with the pace of its host in one more case (→ host_pace)."""
        return replace(self, pace=dict(self.pace) | {name: pace})

    def with_run(
        self, ratios: Mapping[str, float], shares: Mapping[str, float] | None = None
    ) -> Machine:
        """The machine after a run that took so many times as long as priced, by family of op."""
        weights = shares or {}
        new = {
            n: self.learned.get(n, Learned()).with_run(r, weights.get(n, 1.0))
            for n, r in ratios.items()
        }
        return replace(self, learned=dict(self.learned) | new)


def load_machine(this: Mapping[str, Any], ranks: int, threads: int) -> Machine:
    """What is known of this machine; nothing yet where it is new."""
    facts = {k: v for k, v in this.items() if k != "load"}
    facts |= {"ranks": ranks, "threads": threads, "torch": version("torch")}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = run_files.kept("machines") / f"{key}.json"
    found = run_files.read(path)
    try:
        return Machine(
            path, facts, float(found["launch"]),
            {TimedOp(op, dtype, tuple((str(k), float(v)) for k, v in shape)): float(seconds)
             for op, dtype, shape, seconds in found["ops"]},
            {n: Learned(float(t), float(w), int(k)) for n, (t, w, k) in found["learned"].items()},
            {n: float(pace) for n, pace in found.get("pace", {}).items()},
        )  # fmt: skip
    except (TypeError, KeyError, ValueError):  # none, or none of ours
        return Machine(path, facts)


def save_machine(machine: Machine) -> None:
    """Keep what is known; where that cannot be, it is measured again."""
    run_files.keep(
        machine.path,
        {
            "machine": dict(machine.facts),
            "launch": machine.launch,
            "ops": [[*op, seconds] for op, seconds in machine.seconds.items()],
            "learned": {n: [one.total, one.weight, one.runs] for n, one in machine.learned.items()},
            "pace": dict(machine.pace),
        },
    )
