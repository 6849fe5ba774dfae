"""The laboratory's matrix: every (model, plan, network, ranks), again and again, in mixed order.

Rounds go over all configurations, each in an order of its own, so that a slow minute of the machine
does not fall on one of them. Rows are appended as they are made: a run that was stopped, or whose
time was up, goes on where it was.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from foretell.errors import InputError
from foretell.pytorch.ranks.links import measure_cores
from foretell.pytorch.ranks.machine import (
    LOG,
    MACHINE,
    OnProgress,
    Pools,
    Setup,
    measure_machine,
    refused,
)
from foretell.pytorch.ranks.wires import LOOPBACK, network
from foretell_lab.emulation import passes, plans, table
from foretell_lab.emulation.table import Config, Row

_PROFILED = 9  # steps of one rank by itself, in each pass
_BLOCK = 0.03  # seconds: ten of the kernel's slices
WORKER = "foretell_lab.emulation.rank"


@dataclass(frozen=True)
class MatrixRequest:
    """What a laboratory is to do."""

    configs: tuple[Config, ...]
    rounds: int = 3
    steps: int = 5
    warmup: int = 2
    seconds: float = 1200.0  # after which no further run is begun
    notes: bool = False  # write down the pieces of a step of every run
    pin: bool = False  # each rank to cores of its own, where there are enough


def permitted(configs: Sequence[Config]) -> tuple[tuple[Config, ...], str]:
    """What can be run here, and why the rest cannot: without privileges only loopback is left."""
    why = refused(c.network for c in configs)
    if not why:
        return tuple(configs), ""
    changed = dict.fromkeys(Config(c.model, c.plan, LOOPBACK, c.ranks, c.threads) for c in configs)
    return tuple(changed), why


def setups(configs: Sequence[Config]) -> set[Setup]:
    """The numbers of ranks and networks of a matrix."""
    return {(c.ranks, c.network) for c in configs}


def run(folder: Path, request: MatrixRequest, tell: OnProgress = lambda *_: None) -> dict[str, Any]:
    """Run what is missing of a matrix, within its time; what was and was not done."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with ExitStack() as stack:
        lab = Pools(folder, stack, pin=request.pin, worker=WORKER)
        profiles = profile_all(lab, request.configs, tell)
        configs = [c for c in request.configs if plans.applies(c.plan, profiles[c.model], c.ranks)]
        measure_machine(lab, setups(configs), tell)
        before = max((row.at_s for row in table.rows(folder)), default=0.0)
        done = failed = left = 0
        missing = list(_missing(folder, configs, request.rounds))
        for k, (number, config) in enumerate(missing):
            spent = (time.monotonic() - begun) / request.seconds
            if spent > 1:
                left += 1
                continue
            tell(f"round {number + 1}: {config}", max(k / len(missing), spent))
            if k and number > missing[k - 1][0]:
                profiles = look_again(lab, configs, number + 1, tell)
            try:
                at = before + time.monotonic() - begun
                _once(lab, config, profiles[config.model], request, number, at)
                done += 1
            except InputError as error:
                failed += 1
                _log(folder, f"{config}: {error.message}")
                if failed > 5 and failed > done:
                    raise
    return {"configs": len(configs), "done": done, "failed": failed, "left": left,
            "seconds": time.monotonic() - begun}  # fmt: skip


def profile_all(
    lab: Pools, configs: Sequence[Config], tell: OnProgress, rounds: int = 1
) -> dict[str, Any]:
    """One rank by itself for each model, on the samples and with the threads of its ranks.

    Each model is clocked once a round (→ passes.py); `rounds` is how often it was to be by now.
    """
    found: dict[str, Any] = table.read(lab.folder / table.PROFILES) or {}
    threads = sorted({n for c in configs for n in c.thread_counts() if n > 1})
    for name in sorted({c.model for c in configs}):
        known = name in found and all(str(n) in found[name].get("threads", {}) for n in threads)
        if known and passes.count(lab.folder, name) >= rounds:
            continue
        tell(f"profile of {name}")
        pool = lab.pool(1, network(LOOPBACK))
        size = pool.ask({"do": "profile", "model": name, "samples": [], "steps": 1})[0]["samples"]
        sizes = [size, size // 2, size * 3 // 2]
        job = {"do": "profile", "model": name, "samples": sizes, "steps": _PROFILED}
        passes.add(lab.folder, pool.ask(job | {"threads": threads}, seconds=120.0)[0])
    return table.read(lab.folder / table.PROFILES) or {}


def look_again(
    lab: Pools, configs: Sequence[Config], rounds: int, tell: OnProgress
) -> dict[str, Any]:
    """Another pass over all models, and another look at what cores are worth."""
    profiles = profile_all(lab, configs, tell, rounds)
    path = lab.folder / MACHINE
    found = table.read(path)
    for ranks, name in sorted({c.ranks: c.network for c in configs}.items()):
        tell(f"cores of {ranks} ranks")
        found["cores"].append(measure_cores(lab.pool(ranks, network(name))))
    table.write(path, found)
    return profiles


def _missing(folder: Path, configs: Sequence[Config], rounds: int) -> Iterator[tuple[int, Config]]:
    """What is still to run, round by round, each round in an order of its own."""
    seen = {(row.round, row.config) for row in table.rows(folder)}
    for number in range(rounds):
        order = list(configs)
        random.Random(number).shuffle(order)
        yield from ((number, c) for c in order if (number, c) not in seen)


def _once(
    lab: Pools,
    config: Config,
    profile: dict[str, Any],
    request: MatrixRequest,
    number: int,
    at: float,
) -> None:
    made = plans.plan(config.plan, profile, config.ranks)
    job = {"do": "run", "model": config.model, "plan": str(made), "steps": request.steps}
    job |= {"warmup": request.warmup, "notes": request.notes}
    pool = lab.pool(config.ranks, network(config.network))
    answers = pool.ask(job, [{"threads": t} for t in config.thread_counts()])
    after = pool.ask({"do": "burn"})
    each = [max(times) for times in zip(*(a["steps_s"] for a in answers), strict=True)]
    steps = blocks(each)
    probes = [a["busy"] for a in answers] + after
    probe, cpu, wall = (mean(p[key] for p in probes) for key in ("awake_s", "cpu_s", "wall_s"))
    stretch = wall / cpu
    cpu, main = (mean(a[key] for a in answers) for key in ("cpu_s", "main_s"))
    table.append(
        lab.folder,
        Row(
            config.model, config.plan, config.network, config.ranks, config.threads, number,
            median(steps), min(steps), max(steps), len(each), cpu, stretch, at, main, probe,
        ),
    )  # fmt: skip
    if request.notes:
        _note(lab.folder, config, number, answers)


def blocks(steps: Sequence[float]) -> list[float]:
    """Seconds a step, of neighbours together that fill `_BLOCK`: a step that is shorter than the
    kernel's slices is either not held up at all or by several times its length."""
    found, taken = list[float](), list[float]()
    for seconds in steps:
        taken.append(seconds)
        if sum(taken) >= _BLOCK:
            found.append(mean(taken))
            taken = []
    return found or [mean(taken)]


def _note(folder: Path, config: Config, number: int, answers: list[dict[str, Any]]) -> None:
    line = {**vars(config), "round": number, "ranks_notes": [a["notes"] for a in answers]}
    with (folder / table.NOTES).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _log(folder: Path, words: str) -> None:
    with (folder / LOG).open("a") as file:
        file.write(words + "\n")
