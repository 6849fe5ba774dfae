"""The schedule search against a plain CP-SAT model of the same instance: 48 instances, one table.

    python benchmarks/schedules_rival.py [--solve] [--kept] [--seconds 60] [--only TEXT]

Instances: one pipeline, loops, waves, two pipelines, GPT with a sharded embedding (m), mT5 (nn),
Flava (k); 4 to 32 devices, even and uneven stages, tight and loose memory, training and inference.
The rival has every start as a variable, one device at a time, memory as a cumulative resource, and
minimises the makespan; it runs with several workers for 60 CPU seconds unless said otherwise. Its
answers are kept in `measured/schedule_cpsat.json`, each with the CPU seconds it had (`cpu_s`);
`--solve` asks for those that are missing or had less. Ours runs with its default budget; its
answers are kept in `measured/schedule_ours.json`, which `--kept` reads instead of searching again.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from foretell.search.schedule import Problem, schedule, shape

RECORDED = Path(__file__).resolve().parent / "measured" / "schedule_cpsat.json"
OURS = RECORDED.with_name("schedule_ours.json")
WORKERS = 8


class Instance(NamedTuple):
    """A placement, how many micro-batches, and what each device holds at most."""

    name: str
    problem: Problem
    micro_batches: int


def uneven(problem: Problem, seed: int) -> Problem:
    """The placement with every stage's times drawn anew: 2 to 5 forward, backward in proportion."""
    rnd = random.Random(seed)
    factor = {d: rnd.randint(2, 5) for d in sorted({b.devices for b in problem.blocks})}
    blocks = tuple(replace(b, time=b.time * factor[b.devices]) for b in problem.blocks)
    return replace(problem, blocks=blocks, name=f"{problem.name} uneven")


# spec, micro-batches, memory of each device (0: no limit), seed of uneven stages (0: even)
CASES = (
    ("v:devices=4", 8, 3, 0), ("v:devices=4", 8, 4, 1), ("v:devices=8", 16, 6, 2),
    ("v:devices=16", 32, 16, 0), ("v:devices=16", 32, 12, 3), ("v:devices=32", 48, 24, 4),
    ("v:devices=4,split=yes,backward=2", 12, 4, 0), ("v:devices=8,split=yes,backward=2", 16, 8, 5),
    ("loop:devices=4", 8, 6, 0), ("loop:devices=8", 16, 16, 6), ("wave:devices=4", 8, 5, 7),
    ("wave:devices=8,split=yes,backward=2", 16, 16, 0), ("x:devices=4", 8, 4, 0),
    ("x:devices=4", 6, 3, 8), ("x:devices=8", 8, 6, 0), ("x:devices=8", 10, 8, 9),
    ("m:devices=4", 8, 5, 0), ("m:devices=4", 12, 3, 0), ("m:devices=4", 8, 4, 10),
    ("m:devices=8", 16, 10, 0), ("m:devices=8", 16, 8, 11), ("m:devices=16", 32, 20, 0),
    ("m:devices=16", 24, 12, 12), ("m:devices=32", 40, 40, 0), ("nn:devices=4", 8, 6, 0),
    ("nn:devices=4", 12, 3, 0), ("nn:devices=4", 8, 4, 13), ("nn:devices=6", 12, 8, 14),
    ("nn:devices=8", 16, 10, 0), ("nn:devices=8", 22, 8, 0), ("nn:devices=8", 12, 8, 15),
    ("nn:devices=16", 24, 16, 16), ("nn:devices=32", 36, 40, 0), ("k:devices=4", 8, 2, 0),
    ("k:devices=4", 8, 3, 17), ("k:devices=8", 16, 6, 0), ("k:devices=8", 16, 4, 18),
    ("k:devices=16", 24, 10, 19), ("k:devices=32", 32, 18, 0), ("v:devices=8,infer=yes", 16, 0, 20),
    ("x:devices=8,infer=yes", 16, 0, 21), ("m:devices=8,infer=yes", 24, 0, 0),
    ("m:devices=16,infer=yes", 24, 0, 22), ("nn:devices=8,infer=yes", 24, 0, 0),
    ("nn:devices=16,infer=yes", 32, 0, 23), ("k:devices=8,infer=yes", 24, 0, 24),
    ("k:devices=32,infer=yes", 32, 0, 25), ("wave:devices=8,infer=yes", 16, 0, 26),
)  # fmt: skip


def instances() -> Iterator[Instance]:
    """Every case as a problem."""
    for spec, num, memory, seed in CASES:
        found = uneven(shape(spec), seed) if seed else shape(spec)
        limit = f", memory {memory}" if memory else ""
        drawn = f", uneven {seed}" if seed else ""
        name = f"{spec}{drawn}{limit}, {num} micro-batches"
        yield Instance(name, found.limited(memory or None), num)


def residence(problem: Problem, device: int) -> list[tuple[int, int, int]]:
    """(taken by, given back by, amount) on a device: a stage's forward and its last backward."""
    found = []
    on = [i for i, b in enumerate(problem.blocks) if device in b.devices and b.memory]
    gives = [i for i in on if problem.blocks[i].memory < 0]
    for i in on:
        if problem.blocks[i].memory > 0:
            mine = next(g for g in gives[::-1] if _is_stage(problem, i, g))
            gives.remove(mine)
            found.append((i, mine, int(problem.blocks[i].memory)))
    return found


def _is_stage(problem: Problem, forward: int, backward: int) -> bool:
    """Whether a block gives back what a forward took: backward blocks mirror forward ones."""
    forwards = [i for i, b in enumerate(problem.blocks) if b.kind == "F"]
    backwards = [i for i, b in enumerate(problem.blocks) if b.kind in "BI"]
    place = backwards.index(backward if problem.blocks[backward].kind == "B" else backward - 1)
    return forwards.index(forward) == len(forwards) - 1 - place


def rival(one: Instance, seconds: float) -> dict[str, float]:
    """The makespan that a plain CP-SAT model reaches."""
    from ortools.sat.python import cp_model

    problem, num = one.problem, one.micro_batches
    time_of = [int(t) for t in problem.seconds]
    horizon = sum(time_of) * num
    cp = cp_model.CpModel()
    start = [[cp.new_int_var(0, horizon, "") for _ in range(num)] for _ in time_of]
    for w in problem.waits:
        for m in range(num):
            cp.add(start[w.block][m] >= start[w.on][m] + time_of[w.on] + int(w.lag))
    for i, row in enumerate(start):
        for m in range(num - 1):
            cp.add(row[m + 1] >= row[m] + time_of[i])
    for d in range(problem.num_devices):
        here = [i for i, b in enumerate(problem.blocks) if d in b.devices]
        spans = [cp.new_fixed_size_interval_var(s, time_of[i], "") for i in here for s in start[i]]
        cp.add_no_overlap(spans)
        if problem.capacity[d] != float("inf"):
            held, amounts = [], []
            for taken, given, amount in residence(problem, d):
                for m in range(num):
                    size = cp.new_int_var(0, horizon, "")
                    stop = start[given][m] + time_of[given]
                    held.append(cp.new_interval_var(start[taken][m], size, stop, ""))
                    amounts.append(amount)
            cp.add_cumulative(held, amounts, int(problem.capacity[d]))
    end = cp.new_int_var(0, horizon, "")
    for i, row in enumerate(start):
        cp.add(end >= row[-1] + time_of[i])
    cp.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = WORKERS
    began, cpu = time.monotonic(), time.process_time()
    done = Event()

    def watch() -> None:
        while not done.wait(0.2):
            if time.process_time() - cpu > seconds:
                solver.stop_search()

    clock = Thread(target=watch)
    clock.start()
    status = solver.solve(cp)
    done.set()
    clock.join()
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return {
        "makespan": solver.objective_value if found else float("inf"),
        "bound": solver.best_objective_bound,
        "seconds": round(time.monotonic() - began, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
    }


def is_settled(answer: dict[str, float], seconds: float) -> bool:
    """Whether the rival proved its answer or had all the CPU seconds it may have."""
    return answer["makespan"] <= answer["bound"] + 1e-9 or answer["cpu_s"] >= 0.95 * seconds


def solve(seconds: float, only: str) -> None:
    """Ask the rival for every instance that is not settled yet; answers are kept one by one."""
    kept = _read(RECORDED)
    for one in sorted(instances(), key=lambda i: len(i.problem.blocks) * i.micro_batches):
        known = kept.get(one.name)
        if only in one.name and (known is None or not is_settled(known, seconds)):
            kept[one.name] = rival(one, seconds)
            print(one.name, kept[one.name], flush=True)
            _write(RECORDED, kept)


def ours(only: str, *, again: bool) -> dict[str, dict[str, float]]:
    """Our answers with the default budget, kept one by one; found anew where `again`."""
    kept = _read(OURS)
    for one in instances():
        if only in one.name and (again or one.name not in kept):
            found = schedule(one.problem, one.micro_batches)
            kept[one.name] = {
                "makespan": found.makespan,
                "bound": found.makespan_bound,
                "cpu_s": round(found.search_cpu, 2),
                "per_micro_batch": found.per_micro_batch,
                "per_micro_batch_bound": found.lower_bound,
                "proven": found.proven,
            }
            _write(OURS, kept)
    return kept


def _read(path: Path) -> dict[str, dict[str, float]]:
    return json.loads(path.read_text()) if path.exists() else {}


def _write(path: Path, kept: dict[str, dict[str, float]]) -> None:
    path.write_text(json.dumps(kept, indent=1) + "\n")


def rows(mine: dict[str, dict[str, float]], only: str, seconds: float) -> list[str]:
    """The table: every instance with an answer of the rival, both makespans and both bounds."""
    theirs = _read(RECORDED)
    found = [
        "| instance | ours | our bound | CPU s | CP-SAT | its bound | CPU s |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    worse = better = compared = short = unsound = 0
    for one in instances():
        if only not in one.name or one.name not in theirs or one.name not in mine:
            continue
        a, b = mine[one.name], theirs[one.name]
        compared += 1
        short += not is_settled(b, seconds)
        is_worse = a["makespan"] > b["makespan"] + 1e-9
        worse += is_worse
        better += a["makespan"] < b["makespan"] - 1e-9
        unsound += a["bound"] > b["makespan"] + 1e-9 or (
            bool(a["proven"]) and a["per_micro_batch"] > a["per_micro_batch_bound"] * (1 + 1e-9)
        )
        mark = " **worse**" if is_worse else ""
        their = f"{b['makespan']:g}" if b["makespan"] < float("inf") else "none"
        found.append(
            f"| {one.name}{mark} | {a['makespan']:g} | {a['bound']:g} | {a['cpu_s']:.1f} | "
            f"{their} | {b['bound']:g} | {b['cpu_s']:.0f} |"
        )
    total = sum(mine[one.name]["cpu_s"] for one in instances() if one.name in mine)
    return [
        *found,
        "",
        f"{compared} compared: {worse} worse, {compared - worse - better} equal, {better} better; "
        f"{unsound} with a bound or proof that is wrong; in {short} the rival had less than "
        f"{seconds:g} CPU seconds and no proof; {total:.0f} CPU seconds of ours in all",
    ]


def main() -> None:
    """Print the table: every instance, ours and the rival's makespan."""
    only = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
    seconds = float(sys.argv[sys.argv.index("--seconds") + 1]) if "--seconds" in sys.argv else 60.0
    if "--solve" in sys.argv:
        solve(seconds, only)
    mine = ours(only, again="--kept" not in sys.argv)
    print("\n".join(rows(mine, only, seconds)))


if __name__ == "__main__":
    main()
