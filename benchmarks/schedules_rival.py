"""The schedule search against a plain CP-SAT model of the same instance, and its time limits.

    python benchmarks/schedules_rival.py --solve [--seconds 60] [--only TEXT] [--jobs 1]
    python benchmarks/schedules_rival.py [--kept] [--only TEXT] [--jobs 1] [--work 7]
    python benchmarks/schedules_rival.py --limits [--jobs 1]

Instances: one pipeline, loops, waves, two pipelines, GPT with a sharded embedding (m), mT5 (nn),
Flava (k); 4 to 32 devices, even and uneven stages, tight and loose memory, training and inference.
The rival has every start as a variable, one device at a time, memory as a cumulative resource, and
minimises the makespan; it has two threads for 60 seconds each unless said otherwise. Its answers
are kept in `measured/schedule_cpsat.json`, each with the CPU seconds it had (`cpu_s`); `--solve`
asks for those that are missing or had less. The last twelve were drawn by seeds (→ `drawn`).
Ours runs on one thread with its default budget, a twelfth of that, or with `--work`, about CPU
seconds; its answers are kept in `measured/schedule_ours.json`, which `--kept` reads instead of
searching again.
`--limits` prints what `foretell schedule … --time T` takes by the clock on large cases; it wants a
core of its own for every job. `FORETELL_MEASURED` names another folder for what is kept.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from foretell.search.schedule import Problem, schedule, shape
from foretell.search.schedule.find import WORK

KEPT = Path(os.environ.get("FORETELL_MEASURED") or Path(__file__).resolve().parent / "measured")
RECORDED, OURS = KEPT / "schedule_cpsat.json", KEPT / "schedule_ours.json"
THREADS = 2  # of the rival
WITHIN = 1.2  # of a time limit: what the command may take

# model, cluster, micro-batches: what `--limits` schedules; a bare placement where no cluster
LARGE = (
    ("llama-3.1-70b", "h100:gpus=32", 8), ("llama-3.1-70b", "h100:gpus=32", 64),
    ("gpt:layers=48,hidden=4096,heads=32", "dgx-a100:nodes=4", 128),
    ("gpt:layers=96,hidden=12288,heads=96", "dgx-h100:nodes=8", 32),
    ("mixtral-8x7b", "h100:gpus=16", 32), ("bert", "v100:gpus=16", 32),
    ("m:devices=32", "", 256), ("nn:devices=32", "", 512), ("k:devices=32", "", 128),
)  # fmt: skip
LIMITS = (2, 5, 20)


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
    ("v:devices=12", 20, 8, 31), ("v:devices=6,split=yes,backward=2", 14, 5, 32),
    ("loop:devices=6", 12, 9, 33), ("wave:devices=6", 12, 8, 34), ("x:devices=6", 8, 5, 35),
    ("m:devices=6", 10, 5, 36), ("m:devices=12", 20, 10, 37), ("nn:devices=4", 10, 5, 38),
    ("nn:devices=12", 16, 10, 39), ("k:devices=6", 12, 4, 40), ("k:devices=12", 16, 6, 41),
    ("nn:devices=6,infer=yes", 20, 0, 42),
)  # fmt: skip


DRAWN = range(101, 113)  # seeds of the cases that no hand chose


def drawn(seed: int) -> tuple[str, int, int, int]:
    """A case by chance: shape, devices, what of it, micro-batches, micro-batches in flight."""
    rnd = random.Random(seed)
    name = rnd.choice(("v", "loop", "wave", "x", "m", "nn", "k"))
    devices = rnd.choice((4, 5, 6, 6, 7, 8, 8, 10, 12, 16))
    num = rnd.randint(devices, 2 * devices)
    if rnd.random() < 0.15:
        return f"{name}:devices={devices},infer=yes", num, 0, seed
    split = name in ("v", "wave") and rnd.random() < 0.3
    spec = f"{name}:devices={devices}" + ",split=yes,backward=2" * split
    blocks = shape(spec).blocks
    each = int(sum(max(b.memory, 0.0) for b in blocks if 0 in b.devices))
    return spec, num, each * rnd.randint(devices // 2, devices + 1), seed


def instances() -> Iterator[Instance]:
    """Every case as a problem."""
    for spec, num, memory, seed in (*CASES, *map(drawn, DRAWN)):
        found = uneven(shape(spec), seed) if seed else shape(spec)
        limit = f", memory {memory}" if memory else ""
        times = f", uneven {seed}" if seed else ""
        name = f"{spec}{times}{limit}, {num} micro-batches"
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
    solver.parameters.num_workers = THREADS
    began, cpu = time.monotonic(), time.process_time()
    done = Event()

    def watch() -> None:
        while not done.wait(0.2):
            if time.process_time() - cpu > THREADS * seconds:
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
    allowed = 0.95 * THREADS * seconds
    return answer["makespan"] <= answer["bound"] + 1e-9 or answer["cpu_s"] >= allowed


def solve(seconds: float, only: str, jobs: int) -> None:
    """Ask the rival for every instance that is not settled yet; answers are kept one by one."""
    kept = _read(RECORDED)
    wanted = [
        one for one in sorted(instances(), key=lambda i: len(i.problem.blocks) * i.micro_batches)
        if only in one.name
        and not (one.name in kept and is_settled(kept[one.name], seconds))
    ]  # fmt: skip
    _each(rival, wanted, kept, RECORDED, jobs, seconds)


def ours(only: str, jobs: int, work: float, *, again: bool) -> dict[str, dict[str, float]]:
    """Our answers with a budget, kept one by one; found anew where `again`."""
    kept = _read(OURS)
    wanted = [o for o in instances() if only in o.name and (again or o.name not in kept)]
    _each(searched, wanted, kept, OURS, jobs, work)
    return kept


def searched(one: Instance, work: float) -> dict[str, float]:
    """Our answer to an instance."""
    found = schedule(one.problem, one.micro_batches, work=work)
    return {
        "makespan": found.makespan,
        "bound": found.makespan_bound,
        "cpu_s": round(found.search_cpu, 2),
        "per_micro_batch": found.per_micro_batch,
        "per_micro_batch_bound": found.lower_bound,
        "proven": found.proven,
    }


def _each(
    answer: Callable[..., dict[str, float]], wanted: list[Instance],
    kept: dict[str, dict[str, float]], file: Path, jobs: int, *more: float,
) -> None:  # fmt: skip
    """Answer instances in processes of their own, keeping every answer as it comes."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        options = {pool.submit(answer, one, *more): one.name for one in wanted}
        for done in as_completed(options):
            kept[options[done]] = done.result()
            print(options[done], kept[options[done]], file=sys.stderr, flush=True)
            _write(file, kept)


def limited(case: tuple[str, str, int], seconds: float) -> dict[str, float | str]:
    """What the command takes by the clock with a time limit."""
    placement, cluster, num = case
    words = [placement, *(["--on", cluster] if cluster else ["-m", "40"]), "-n", str(num)]
    command = [sys.executable, "-m", "foretell", "schedule", *words, "--no-cache", "--json"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--time", str(seconds)], capture_output=True, text=True, check=False
    )
    took = time.monotonic() - began
    found = json.loads(done.stdout) if done.returncode == 0 else {"stopped": done.stderr[-200:]}
    return {
        "seconds": round(took, 2),
        "step": found.get("step_s", found.get("makespan", 0.0)),
        "stopped": found["stopped"],
    }


def limits(jobs: int) -> list[str]:
    """The table of time limits: every large case, three limits; written as they end."""
    found = ["| case | limit | took | step | ended by |", "|---|--:|--:|--:|---|"]
    late = 0
    with ThreadPoolExecutor(jobs) as pool:
        options = [(c, t, pool.submit(limited, c, t)) for t in LIMITS for c in LARGE]
        for case, limit, future in options:
            row = future.result()
            is_late = row["seconds"] > WITHIN * limit
            late += is_late
            name = f"{case[0]} {case[1] or 'memory 40'}, {case[2]} micro-batches"
            mark = " **late**" if is_late else ""
            found.append(
                f"| {name} | {limit} | {row['seconds']:.2f}{mark} | {row['step']:.6g} | "
                f"{row['stopped']} |"
            )
            print(found[-1], file=sys.stderr, flush=True)
    return [*found, "", f"{len(options)} limits, {late} passed by more than 20 %"]


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
        f"{THREADS} × {seconds:g} CPU seconds and no proof; {total:.0f} CPU seconds of ours in all",
    ]


def _given(name: str, usual: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else usual


def main() -> None:
    """Print the table: every instance, ours and the rival's makespan."""
    only, seconds = _given("--only", ""), float(_given("--seconds", "60"))
    jobs = int(_given("--jobs", "1"))
    if "--limits" in sys.argv:
        print("\n".join(limits(jobs)))
    elif "--solve" in sys.argv:
        solve(seconds, only, jobs)
    else:
        work = float(_given("--work", str(WORK)))
        mine = ours(only, jobs, work, again="--kept" not in sys.argv)
        print("\n".join(rows(mine, only, seconds)))


if __name__ == "__main__":
    main()
