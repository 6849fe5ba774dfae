"""What the laboratory's runs were predicted to take, from one rank by itself and bench alone.

How busy the machine was is no part of a prediction but of the question: a run's row says what a
core was worth just before and after it (`Busy`), and the step is predicted for such a machine.
Without it (`is_blind`) the cores are taken as bench found them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from foretell.errors import InputError
from foretell.graph import Graph
from foretell.simulate import Timeline, simulate
from foretell_lab.emulation import plans, table
from foretell_lab.emulation.host import Host, host
from foretell_lab.emulation.passes import middle
from foretell_lab.emulation.prices import Prices
from foretell_lab.emulation.step import Knobs, Setting, step
from foretell_lab.emulation.sync_methods import same
from foretell_lab.emulation.table import Config, Row


@dataclass(frozen=True, eq=False)
class Known:
    """What predictions start from: the folder of a laboratory, or part of one."""

    profiles: dict[str, Any]
    machine: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Known:
        found = [table.read(folder / name) for name in (table.PROFILES, table.MACHINE)]
        if None in found:
            raise InputError(
                f"`{folder}` has no {table.PROFILES} or no {table.MACHINE}",
                hint="make them with `foretell lab -o FOLDER`",
            )
        return cls(*found)

    def cores(self, ranks: int) -> dict[str, float]:
        """What bench found when that many ranks worked at once, or nearly that many."""
        rows = self.machine["cores"]
        plain = {"stretch": 1.0, "late": 1.0, "cpu_s": 0.0}
        near = min((row["ranks"] for row in rows), key=lambda n: abs(n - ranks), default=0)
        seen = [row for row in rows if row["ranks"] == near]
        return plain | (middle(seen) if seen else {})

    def host(self, config: Config, busy: Busy) -> Host:
        """What starting a message, copying a gradient, waking and working cost a rank.

        A core is slower beside others: it shares clock, caches and execution units with them.
        """
        cores = self.cores(config.ranks)
        alone = self.profiles[config.model].get("probe_s") or self.cores(1)["cpu_s"]
        here = busy.probe or cores["cpu_s"]
        slow = here / alone if here and alone else 1.0
        return host(self.machine, config, slow, here, cores.get("woke_s", 0.0))


@dataclass(frozen=True)
class Busy:
    """What a core was worth: wall over core seconds, and core seconds of the fixed work; 0: ask
    bench."""

    stretch: float = 0.0
    probe: float = 0.0

    @classmethod
    def of(cls, rows: list[Row]) -> Busy:
        """What it was worth over some runs."""
        return cls(mean(row.stretch for row in rows), mean(row.probe_s for row in rows))


@dataclass(frozen=True)
class Comparison:
    """One configuration: predicted, measured, and how far its runs lie apart."""

    config: Config
    predicted: float
    measured: float
    spread: float  # mean distance of runs from their median, relative
    stretch: float
    runs: int
    same: str = ""  # what plans have in common that come to the same step

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1

    @property
    def beyond(self) -> float:
        """What of the error the spread of runs does not account for."""
        return max(0.0, abs(self.error) - self.spread)


def graph(
    known: Known, config: Config, busy: Busy | None = None, knobs: Knobs | None = None
) -> Graph:
    """The predicted step of a configuration as a graph."""
    if config.model not in known.profiles:
        raise InputError(f"no profile of `{config.model}`", hint="run `foretell lab` with it")
    profile = known.profiles[config.model]
    prices = Prices(known.machine, config.network, config.ranks) if config.ranks > 1 else None
    cores, busy = known.cores(config.ranks), busy or Busy()
    worth = (busy.stretch or cores["stretch"]) * cores["late"]
    host = known.host(config, busy)
    setting = Setting(profile, prices, worth, config.thread_counts(), host, knobs or Knobs())
    return step(plans.plan(config.plan, profile, config.ranks), setting)


def predict(
    known: Known, config: Config, busy: Busy | None = None, knobs: Knobs | None = None
) -> Timeline:
    """The predicted step of a configuration, simulated."""
    return simulate(graph(known, config, busy, knobs))


def compared(
    known: Known, rows: list[Row], knobs: Knobs | None = None, *, is_blind: bool = False,
    like: list[Row] | None = None,
) -> list[Comparison]:  # fmt: skip
    """Every configuration that was run, beside what was predicted of it.

    What was run once has the spread of others on its network, of these rows or those it is `like`.
    """
    groups = table.by_config(rows)
    typical = _typical(table.by_config(like) if like else groups)
    found = [_compared(known, c, group, knobs, is_blind) for c, group in groups.items()]
    return [h if h.runs > 1 else replace(h, spread=typical(h.config)) for h in found]


def _typical(groups: dict[Config, list[Row]]) -> Callable[[Config], float]:
    """The spread of what was run once: that of others on its network, of all others, or none."""
    known = [(c.network, table.spread(group)) for c, group in groups.items() if len(group) > 1]

    def spread(config: Config) -> float:
        near = [s for name, s in known if name == config.network] or [s for _, s in known]
        return mean(near) if near else 0.0

    return spread


def _compared(
    known: Known, config: Config, group: list[Row], knobs: Knobs | None, is_blind: bool
) -> Comparison:
    busy = Busy() if is_blind else Busy.of(group)
    profile = known.profiles[config.model]
    made = plans.plan(config.plan, profile, config.ranks)
    return Comparison(
        config,
        predict(known, config, busy, knobs).seconds,
        table.middle(group),
        table.spread(group),
        busy.stretch or known.cores(config.ranks)["stretch"],
        len(group),
        same(made, profile["parameters"]),
    )
