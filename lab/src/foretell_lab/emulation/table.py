"""What a laboratory leaves behind: a folder that a run goes on from, read without torch.

profiles.json   one rank by itself, a model each
machine.json    what was measured on, collectives and cores of every network
rows.csv        one row a run: what, where, how long its steps took, how busy the machine was
notes.jsonl     when the pieces of some steps began and ended, rank by rank
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from foretell.errors import InputError
from foretell.pytorch.ranks.machine import MACHINE, read, write

__all__ = ["MACHINE", "NOTES", "PROFILES", "ROWS", "Config", "Row", "append", "by_config",
           "middle", "read", "rows", "spread", "write"]  # fmt: skip

ROWS, PROFILES, NOTES = "rows.csv", "profiles.json", "notes.jsonl"


@dataclass(frozen=True)
class Config:
    """One thing to run: a model, under a plan, on a network."""

    model: str
    plan: str
    network: str
    ranks: int
    threads: str = "1"  # of each rank, joined by `+`; the last for all that follow

    def __str__(self) -> str:
        return f"{self.model} {self.plan} on {self.ranks} x {self.network}"

    def thread_counts(self) -> list[int]:
        """Threads of every rank."""
        given = [int(part) for part in self.threads.split("+")]
        return [given[min(rank, len(given) - 1)] for rank in range(self.ranks)]


@dataclass(frozen=True)
class Row:
    """One run of a configuration: the slowest rank of each step, medians over steps."""

    model: str
    plan: str
    network: str
    ranks: int
    threads: str
    round: int
    step_s: float
    low_s: float
    high_s: float
    steps: int
    cpu_s: float  # of all threads of a rank, a step, the mean of ranks
    stretch: float  # wall over core seconds of a fixed piece of work, before and after
    at_s: float  # since the lab began
    main_s: float = 0.0  # of the thread that computes, of `cpu_s`; 0 where it was not measured
    probe_s: float = 0.0  # core seconds of that fixed piece of work; likewise

    @property
    def config(self) -> Config:
        return Config(self.model, self.plan, self.network, self.ranks, self.threads)


def append(folder: Path, row: Row) -> None:
    """Add a row; the file is whole after each."""
    path = folder / ROWS
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)])
        if is_new:
            writer.writeheader()
        writer.writerow({k: f"{v:.6g}" if type(v) is float else v for k, v in asdict(row).items()})


def rows(folder: Path) -> list[Row]:
    """Every row that was measured; none where nothing was."""
    path = folder / ROWS
    if not path.exists():
        return []
    kinds = {f.name: {"int": int, "float": float}.get(str(f.type), str) for f in fields(Row)}
    plain = {"main_s": "0", "probe_s": "0"}  # rows of before have no such columns
    found = []
    with path.open(newline="") as file:
        for number, line in enumerate(csv.DictReader(file), start=2):
            try:
                found.append(
                    Row(**{name: kind((plain | line)[name]) for name, kind in kinds.items()})
                )
            except (KeyError, TypeError, ValueError):
                raise InputError(
                    f"`{path}`, line {number}: not a row of a lab",
                    hint=f"its columns are {', '.join(kinds)}",
                ) from None
    return found


def by_config(found: Iterable[Row]) -> dict[Config, list[Row]]:
    """The runs of each configuration, in the order they were made."""
    groups: dict[Config, list[Row]] = {}
    for row in found:
        groups.setdefault(row.config, []).append(row)
    return groups


def middle(group: list[Row]) -> float:
    """Seconds of a configuration's step: the median of its runs."""
    return median(row.step_s for row in group)


def spread(group: list[Row]) -> float:
    """How far runs of the same lie apart: mean distance from their median, relative to it."""
    at = middle(group)
    return sum(abs(row.step_s - at) for row in group) / len(group) / at
