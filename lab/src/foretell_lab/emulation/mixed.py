"""Ranks of unequal speed behind unequal links: plans run there, and what was predicted of them.

For every setting bench measures, under the same shares of a core and on the same links: what each
rank is worth (steps of the model by itself, all ranks at once), collectives to every server, and
messages between every two ranks. Runs then go round in mixed order, several times.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import permutations
from pathlib import Path
from statistics import mean, median
from typing import Any

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.pytorch.ranks.links import measure_links
from foretell.pytorch.ranks.machine import LOG
from foretell.pytorch.ranks.pool import Pool
from foretell.pytorch.ranks.wires import network
from foretell.simulate import simulate
from foretell_lab.emulation import cpu, mixed_plans, table
from foretell_lab.emulation.matrix import WORKER
from foretell_lab.emulation.mixed_parts import RankSpeed
from foretell_lab.emulation.mixed_step import seconds_alone, step
from foretell_lab.emulation.prices import Prices

SIZES = (4096, 65536, 524288, 2097152)  # bytes of messages that are measured
PROFILED = 9  # steps of one rank by itself
TIMES = {"mlp": 4, "vgg": 3}  # samples over the lab's: here a rank's work has to matter
NEAR = 0.03  # a plan that close to the best is as good
MACHINE, ROWS = "mixed.json", "mixed.jsonl"
OnProgress = Callable[[str], None]
Own = Mapping[str, Callable[["Mixed", "Setting"], Plan | None]]  # plans of a caller, by name


@dataclass(frozen=True)
class Setting:
    """A model on ranks that differ."""

    model: str  # by its name, and behind `:` samples of a rank where they are not the usual
    network: str  # rates of links, joined by `+`
    ranks: int
    cpu: str  # shares of a core, joined by `+`; 0 for all that can be had
    threads: str = "1"

    def __str__(self) -> str:
        extra = f", threads {self.threads}" if self.threads != "1" else ""
        return f"{self.model} on {self.ranks} ranks of {self.cpu} core, {self.network}{extra}"

    @property
    def name(self) -> str:
        """The model."""
        return self.model.partition(":")[0]

    def samples(self, usual: int) -> int:
        """Samples of a rank's step where all have as many."""
        said = self.model.partition(":")[2]
        return int(said) if said else usual * TIMES.get(self.name, 1)

    @property
    def place(self) -> str:
        """What messages depend on."""
        return f"{self.network} cpu {self.cpu}"

    def counts(self) -> list[int]:
        """Threads of every rank."""
        given = [int(part) for part in self.threads.split("+")]
        return [given[min(rank, len(given) - 1)] for rank in range(self.ranks)]


@dataclass
class Mixed:
    """Pools of ranks, the folder that rows go to, and what was measured so far."""

    folder: Path
    stack: ExitStack
    tell: OnProgress = lambda _: None
    own: Own = field(default_factory=dict)
    pools: dict[int, tuple[Pool, cpu.Quotas]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        known = table.read(self.folder / MACHINE) or {}
        self.profiles: dict[str, Any] = known.get("profiles", {})
        self.speeds: dict[str, list[list[float]]] = known.get("speeds", {})  # again and again
        self.machine: dict[str, Any] = known.get("machine", {"links": [], "acts": {}})

    def save(self) -> None:
        found = {"profiles": self.profiles, "speeds": self.speeds, "machine": self.machine}
        table.write(self.folder / MACHINE, found)

    def pool(self, setting: Setting) -> Pool:
        """Ranks with the links and shares of a setting."""
        found = self.pools.get(setting.ranks)
        if found is None or found[0].is_broken:
            wires = network(setting.network)
            made = Pool(setting.ranks, wires, self.folder / LOG, worker=WORKER)
            pool = self.stack.enter_context(made)
            found = pool, self.stack.enter_context(cpu.Quotas(pool.pids))
            self.pools[setting.ranks] = found
        found[0].shape(network(setting.network))
        found[1].limit(cpu.parse(setting.cpu, setting.ranks))
        return found[0]


def run(
    folder: Path, settings: Sequence[Setting], plans: Sequence[str], *, rounds: int = 3,
    steps: int = 5, seconds: float = 1200.0, tell: OnProgress = lambda _: None,
    own: Own | None = None,
) -> None:  # fmt: skip
    """Bench and run what is missing, within its time; rows are appended as they are made."""
    why = cpu.refusal()
    if why:
        raise InputError(why, hint="run it as root, where cgroups are")
    begun = time.monotonic()
    with ExitStack() as stack:
        lab = Mixed(folder, stack, tell, own or {})
        for number in range(rounds):
            for setting in settings:
                measure(lab, setting, number)
            for _, setting, name in _missing(folder, settings, plans, number):
                plan = made(lab, setting, name)
                if plan is None or time.monotonic() - begun > seconds:
                    continue
                tell(f"round {number + 1}: {name}, {setting}")
                try:
                    _once(lab, setting, name, plan, number, steps)
                except InputError as error:
                    with (folder / "ranks.log").open("a") as log:
                        log.write(f"{name}, {setting}: {error.message}\n")


def measure(lab: Mixed, setting: Setting, number: int) -> None:
    """Profile, speeds and messages of a setting, as far as they are not known for this round.

    Machines that others use too change within minutes; so bench goes round as runs do.
    """
    if setting.model not in lab.profiles:
        lab.tell(f"profile of {setting.model}")
        lab.profiles[setting.model] = _profile(lab, setting)
    pool, links = lab.pool(setting), lab.machine["links"]
    place = {"network": setting.place, "ranks": setting.ranks, "round": number}
    if not any(place.items() <= row.items() for row in links):
        rows = measure_links(pool, setting.place, SIZES, _ops(setting.ranks), lab.tell)
        links += [row | place for row in rows]
    if str(setting.ranks) not in lab.machine["acts"]:
        free = lab.pool(Setting(setting.model, setting.network, setting.ranks, "1"))
        found = free.ask({"do": "acts", "steps": 5})
        lab.machine["acts"][str(setting.ranks)] = median(a["act_s"] for a in found)
        lab.pool(setting)
    speeds = lab.speeds.setdefault(str(setting), [])
    if len(speeds) <= number:
        lab.tell(f"speed of {setting}")
        speeds.append(_stretches(lab, setting, pool))
    lab.save()


def _ops(ranks: int) -> list[str]:
    every = [f"{op} {r}" for op in ("reduce", "broadcast") for r in range(ranks)]
    pairs = [f"send {a} {b}" for a, b in permutations(range(ranks), 2)]
    return ["all_reduce", "all_gather", *every, *pairs]


def _profile(lab: Mixed, setting: Setting) -> Any:
    """One rank by itself, with a core of its own; the others are there and do nothing."""
    pool = lab.pool(Setting(setting.model, setting.network, setting.ranks, "1"))
    first = {"do": "profile", "model": setting.name, "samples": [], "steps": 1}
    size = setting.samples(pool.ask(first)[0]["samples"])
    sizes = sorted({max(1, round(size * part)) for part in (0.25, 0.5, 1, 1.5, 2, 3)})
    each = [{"samples": sizes}] + [{"samples": []}] * (setting.ranks - 1)
    job = {"do": "profile", "model": setting.name, "steps": PROFILED}
    return pool.ask(job, each, seconds=240.0)[0] | {"samples": size}


def _stretches(lab: Mixed, setting: Setting, pool: Pool) -> list[float]:
    """Wall seconds of each rank for a core second of the profile."""
    profile = lab.profiles[setting.model]
    samples = int(profile["samples"])
    alone = seconds_alone(profile, samples)
    job = {"do": "speed", "model": setting.name, "samples": samples}
    job["steps"] = max(4, round(0.25 / alone))
    each = [{"threads": t} for t in setting.counts()]
    answers = [pool.ask(job, each, seconds=240.0) for _ in range(2)]
    return [
        mean(s for answer in answers for s in answer[r]["steps_s"]) / alone
        for r in range(setting.ranks)
    ]


def made(lab: Mixed, setting: Setting, name: str) -> Plan | None:
    """The plan of a name for a setting, from what its ranks were found worth at first."""
    if name in lab.own:
        return lab.own[name](lab, setting)
    worth = [1 / s for s in lab.speeds[str(setting)][0]]
    return mixed_plans.plan(name, lab.profiles[setting.model], worth)


def _missing(
    folder: Path, settings: Sequence[Setting], plans: Sequence[str], number: int
) -> Iterator[tuple[int, Setting, str]]:
    """What is still to run of a round, each round in an order of its own."""
    seen = {(row["round"], _setting(row), row["plan"]) for row in rows(folder)}
    order = [(setting, name) for setting in settings for name in plans]
    random.Random(number).shuffle(order)
    yield from ((number, s, n) for s, n in order if (number, s, n) not in seen)


def _once(lab: Mixed, setting: Setting, name: str, plan: Plan, number: int, steps: int) -> None:
    pool = lab.pool(setting)
    job = {"do": "run", "model": setting.name, "plan": str(plan), "steps": steps, "warmup": 1}
    shares = plan.shares or (plan.global_batch // plan.ranks,) * plan.ranks
    given = [0] * plan.ranks if plan.groups else shares
    each = [{"threads": t, "samples": n} for t, n in zip(setting.counts(), given, strict=True)]
    answers = pool.ask(job, each, seconds=120.0)
    took = [max(times) for times in zip(*(a["steps_s"] for a in answers), strict=True)]
    row = asdict(setting) | {"plan": name, "round": number, "steps_s": took}
    with (lab.folder / ROWS).open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows(folder: Path) -> list[dict[str, Any]]:
    """Every run that was made."""
    path = folder / ROWS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _setting(row: dict[str, Any]) -> Setting:
    return Setting(row["model"], row["network"], row["ranks"], row["cpu"], row["threads"])


@dataclass(frozen=True)
class Comparison:
    """One plan in one setting: predicted, measured, and how far its runs lie apart."""

    setting: Setting
    plan: str
    predicted: float
    measured: float
    spread: float  # mean distance of runs from their median, relative
    runs: int
    bytes: float  # that messages of the predicted step carry

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compared(folder: Path, own: Own | None = None) -> list[Comparison]:
    """Every plan that was run, beside what was predicted of it from bench alone."""
    lab, groups = (
        Mixed(folder, ExitStack(), own=own or {}),
        dict[tuple[Setting, str], list[float]](),
    )
    for row in rows(folder):
        groups.setdefault((_setting(row), row["plan"]), []).append(median(row["steps_s"]))
    out = []
    for (setting, name), each in groups.items():
        plan, at = made(lab, setting, name), median(each)
        assert plan is not None, "it was run, so there is such a plan"
        graph = step(plan, lab.profiles[setting.model], worth_of(lab, setting))
        spread = mean(abs(s - at) for s in each) / at
        sent = float(graph.comm_bytes.sum())
        out.append(Comparison(setting, name, simulate(graph).seconds, at, spread, len(each), sent))
    return out


def worth_of(lab: Mixed, setting: Setting, rounds: int = 1_000) -> RankSpeed:
    """What bench found of a setting: medians over its rounds, or over the first so many."""
    each: dict[tuple[str, int], list[Any]] = {}
    for row in lab.machine["links"]:
        here = (row["network"], row["ranks"]) == (setting.place, setting.ranks)
        if here and row["round"] < rounds:
            each.setdefault((row["op"], row["bytes"]), []).append(row)
    middle = [
        group[0] | {key: median(row[key] for row in group) for key in ("seconds", "cpu_s")}
        for group in each.values()
    ]
    speeds = lab.speeds[str(setting)][:rounds]
    stretch = [median(ranks) for ranks in zip(*speeds, strict=True)]
    prices = Prices({"links": middle}, setting.place, setting.ranks)
    return RankSpeed(prices, stretch, float(lab.machine["acts"][str(setting.ranks)]))


def picks(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """For each setting the plan predicted best, and how much longer it takes than the best run."""
    groups: dict[Setting, list[Comparison]] = {}
    for row in found:
        groups.setdefault(row.setting, []).append(row)
    out = []
    for setting, group in groups.items():
        ours = min(group, key=lambda row: row.predicted)
        best = min(group, key=lambda row: row.measured)
        out.append(
            {"setting": setting, "ours": ours.plan, "best": best.plan, "plans": len(group),
             "regret": ours.measured / best.measured - 1, "spread": max(ours.spread, best.spread)}
        )  # fmt: skip
    return out
