"""The machine at hand: what is known of it from run to run, and how busy it is for a plan's ranks.

Seconds of ops and factors on prices are kept in one file a machine (processor, cores, threads of a
rank, ranks, versions of Python and torch) in `$XDG_CACHE_HOME/foretell/machines`: another machine,
or another torch, begins anew.

The load is that of work and messages as the steps of a plan have them: ranks work all at once and
meet after a piece of work. It is tried with small matmuls, all ranks of the run at once, so that
ranks which share cores are timed sharing them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from foretell.cost.price import TimedOp
from foretell.pytorch import timed
from foretell.pytorch.deploy import run_files

SPREAD = tomllib.loads((Path(__file__).parent / "spread.toml").read_text())
PRIOR = {name: float(value) for name, value in SPREAD["prior"].items()}
NOISE = float(SPREAD["noise"]["run"])
_KEPT = 20_000  # ops
_OLD = 0.8  # weight of what was learned before, at each run
Tensor = Any
BURN = 4e-3  # core seconds of one piece of work that is tried, at most
_LEAST = 5e-4  # and at least
_PIECE = 0.1  # core seconds between two messages, at most
_ROUNDS = (12, 100)  # of work and a message
_WHILE = 1.0  # core seconds of a rank's rounds


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


class Load(NamedTuple):
    """What ranks find on the machine."""

    busy: float  # wall over core seconds of work
    unsteady: float  # standard deviation of its logarithm
    others: float  # the same, with what a rank waits for a core when a message has come
    late: float  # seconds of a small message behind work


def probe(piece: float) -> Load:
    """The load as steps find it; `piece`: core seconds between two of their messages."""
    each = min(max(piece, _LEAST), BURN)
    work = _work(each)
    span = max(1, round(min(piece, _PIECE) / each))
    many = round(_WHILE / (span * each))
    return _at_once(work, span, min(max(many, _ROUNDS[0]), _ROUNDS[1]))


def _work(seconds: float) -> Callable[[], tuple[float, float]]:
    """Work of so many core seconds; wall and core seconds that it took."""
    x = torch.randn(128, 128)
    many = max(1, round(seconds / max(timed.timed(lambda: x @ x), 1e-6)))

    def work() -> tuple[float, float]:
        wall, core = time.perf_counter(), time.thread_time()
        for _ in range(many):
            x @ x
        return time.perf_counter() - wall, time.thread_time() - core

    return work


def _at_once(work: Callable[[], tuple[float, float]], span: int, rounds: int) -> Load:
    """Rounds of work with a small message behind each, as steps have them.

    A rank that has waited for a message is served first for a while, whatever else runs: so short
    pieces between messages find less of a load than long ones.
    """
    small = torch.zeros(8)
    rows: list[tuple[float, float, float]] = []
    dist.barrier()
    queued = run_files.queued()
    for _ in range(rounds):
        both = [work() for _ in range(span)]
        wall, core = (sum(column) for column in zip(*both, strict=True))
        start = time.perf_counter()
        dist.all_reduce(small)
        rows.append((wall, wall + time.perf_counter() - start, core))
    others = _waited(run_files.queued() - queued, sum(row[2] for row in rows))
    each = torch.tensor(rows[1:], dtype=torch.float64)
    least = each[:, 2].median()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(each, op=dist.ReduceOp.MAX)  # of the slowest rank
    busy = (each[:, 0] / least).clamp(min=1.0)
    late = usual(each[:, 1] - each[:, 0])
    return Load(usual(busy), float(busy.log().std()), others, late)


def _waited(queued: float, core: float) -> float:
    """Core and waiting seconds over core seconds, of the rank that waits longest for a core."""
    found = torch.tensor(1.0 + queued / max(core, 1e-9), dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def usual(seconds: Tensor) -> float:
    """The mean, but for the longest quarter: what else a machine does comes in bursts."""
    ordered = seconds.sort().values
    return float(ordered[: max(len(ordered) * 3 // 4, 1)].mean())
