"""What the schedule search finds and what it costs: the figures of the docs, in one run.

    python benchmarks/schedules.py [--quick] [--seeds 0-19] [--tessel] [--real]

CPU seconds of this process with all threads, never from the cache. Placements come from the shared
truth where it is there; random ones are made here. `--tessel` runs Tessel's two phases too;
`--real` only shows models with priced blocks (→ schedules_real.py).
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import schedules_real as real
from table import Row, show

from foretell.search.schedule import Problem, Schedule, load, read, schedule, shape

TRUTH = Path(__file__).resolve().parents[1].parent / "shared" / "truth"
NONE = float("inf")
# where Tessel's scripts give no memory: theirs for a like placement
MEMORY = {
    "alphafold_4dev_train": 4,
    "finetune_4dev_train": 6,
    "kshape_8dev_train": 10,
    "mllm_4dev_train": 6,
    "xshape_6dev_train": 6,
    "xshape_8dev_train": 8,
}


class Best(NamedTuple):
    """The best that others reached: the period and the makespans of 8 and 128 micro-batches."""

    period: float = NONE
    short: float = NONE
    long: float = NONE

    def __str__(self) -> str:
        return ", ".join("–" if x == NONE else f"{x:g}" for x in self)


def placements() -> Iterator[tuple[str, Problem, float]]:
    """The shared placements, each with the memory of Tessel's own scripts."""
    for path in sorted((TRUTH / "schedules").glob("*.json")):
        settings = json.loads(path.read_text())["upstream_settings"]
        yield path.stem, load(path), float(MEMORY.get(path.stem) or settings[0]["memory"])


def recorded(name: str, memory: float) -> Best:
    """What Tessel and a plain CP-SAT model reached with this much memory or less."""
    baseline = json.loads((TRUTH / "schedules_baseline.json").read_text())
    found = [Best()]
    for row in baseline["cpsat_modulo"]:
        if row["case"] == name and row["M"] <= memory:
            found.append(Best(row["P"], row["asap"]["8"], row["asap"]["128"]))
    for row in baseline["tessel"]:
        case = f"{row['placement']}_{row['ndevs']}dev_{'train' if row['train'] else 'infer'}"
        if case == name and row.get("solution") and row["memory"] <= memory:
            ends = {n: min(m["concat"], m["asap"]) for n, m in row["makespan"].items()}
            found.append(Best(row["period"], ends.get("8", NONE), ends.get("128", NONE)))
    return Best(*map(min, zip(*found, strict=True)))


def length(found: Schedule) -> str:
    """The makespan, and its bound where that is not met."""
    bound = "" if found.makespan_gap == 0 else f" (≥ {found.makespan_bound:g})"
    return f"{found.makespan:g}{bound}"


def shared() -> list[Row]:
    """All shared placements, each beside the best that others reached."""
    rows, found = [], []
    worse = 0
    for name, problem, memory in placements():
        short, long = (schedule(problem, n, memory) for n in (8, 128))
        best = recorded(name, memory)
        worse += any(
            ours > theirs
            for ours, theirs in zip(
                (short.per_micro_batch, short.makespan, long.makespan), best, strict=True
            )
        )
        found += [short, long]
        cpu = short.search_cpu + long.search_cpu
        figure = f"{short.per_micro_batch:g}, {length(short)}, {length(long)}; {cpu:.2f} s"
        rows.append(Row(f"{name}, memory {memory:g}", figure, str(best)))
    proven, least = sum(f.proven for f in found), sum(f.makespan_gap == 0 for f in found)
    rows.append(Row("period proven minimal", f"{proven // 2} of {len(rows)}", "all, or the gap"))
    rows.append(Row("makespan proven minimal", f"{least} of {len(found)}"))
    rows.append(Row("worse than Tessel or plain CP-SAT", str(worse), "0"))
    rows.append(Row("CPU seconds in all", f"{sum(f.search_cpu for f in found):.1f}", "≤ 30"))
    return rows


def large() -> list[Row]:
    """CPU seconds on placements of 4 to 32 devices."""
    rows = []
    for spec, num, memory, bar in (
        ("nn", 8, 6, 0.3),
        ("m:devices=8", 128, 20, 3),
        ("nn:devices=8", 128, 20, 3),
        ("v:devices=16", 128, 16, 30),
        ("m:devices=16", 128, 40, 30),
        ("v:devices=32", 128, 32, 60),
        ("m:devices=32", 128, 80, 60),
    ):
        found = schedule(shape(spec), num, memory)
        what = f"{spec}, {num} micro-batches, memory {memory}"
        rows.append(Row(what, f"{found.search_cpu:.2f} s; {length(found)}", f"≤ {bar} s"))
    return rows


def tight() -> list[Row]:
    """Little memory: time a micro-batch, and up to what pattern nothing better exists."""
    rows = []
    for spec, memory, bar in (
        ("v", 3, "≤ 5.34 (Tessel 8)"),
        ("m", 3, "≤ 8.5 (Tessel 10)"),
        ("m", 4, "(one a pattern: 7)"),
        ("k", 2, "(Tessel 8)"),
        ("x", 3, "(one a pattern: 9)"),
        ("nn", 3, "solved, or gap ≤ 5 %"),
    ):
        found = schedule(shape(spec), 8, memory)
        upto = "any" if found.proven_unroll is None else f"1–{found.proven_unroll}"
        figure = f"{found.period:g}/{found.unroll} = {found.per_micro_batch:.3f}"
        figure += f", least for {upto} a pattern, bound {found.lower_bound:.3f}"
        rows.append(Row(f"{spec}, memory {memory}", f"{figure}; {found.search_cpu:.1f} s", bar))
    return rows


def split(quick: bool) -> list[Row]:
    """Backward in two gradients, all times 1: against zero-bubble schedules at their memory."""
    rows = []
    for spec, num, memory, bar in (("v", 8, 4, 27), ("m", 6, 6, 33)):
        found = schedule(shape(f"{spec}:split=yes,backward=2"), num, memory)
        rows.append(Row(f"{spec}, {num} micro-batches, memory {memory}", length(found), str(bar)))
    for p in (4, 8) if quick else (4, 6, 8, 10, 12, 14, 16):
        cases = (("v", "zb-h1", p), ("v", "zb-h2", 2 * p - 1), ("wave", "zb-v", 2 * p))
        for place, method, memory in cases:
            problem = shape(f"{place}:devices={p},split=yes,backward=2")
            fixed = schedule(problem, 3 * p, memory, method=method)
            found = schedule(problem, 3 * p, memory, objective="idle")
            figure = f"{found.makespan:g}, {found.idle:g}; {found.search_cpu:.1f} s"
            what = f"{method} at p = {p}: makespan, longest idle"
            rows.append(Row(what, figure, f"≤ {fixed.makespan:g}, {fixed.idle:g}"))
    return rows


def placement(seed: int) -> dict[str, Any]:
    """A pipeline of uneven stages, some sharded, at times with a skip; backward mirrors forward."""
    rnd = random.Random(seed)
    n = rnd.choice([2, 3, 4, 5])
    order = list(range(n)) + ([rnd.randrange(n)] if rnd.random() < 0.5 else [])
    num = len(order)
    wide = [rnd.random() < 0.2 for _ in order]
    blocks = []
    for k, d in enumerate(order):
        devices = list(range(n)) if wide[k] else [d]
        more = {"time": rnd.randint(1, 3), "mem": 0 if wide[k] else 1}
        blocks.append({"id": k, "kind": "F", "devices": devices, **more})
    deps = [[k - 1 if k < 2 or rnd.random() < 0.8 else k - 2, k] for k in range(1, num)]
    for f in blocks[:num]:
        more = {"id": num + f["id"], "kind": "B", "time": 2 * f["time"], "mem": -f["mem"]}
        blocks.append({**f, **more})
    deps += [[num + b, num + a] for a, b in deps] + [[k, num + k] for k in range(num)]
    return {"name": f"random{seed}", "ndevs": n, "mode": "train", "blocks": blocks, "deps": deps}


def illegal(answer: dict[str, Any], options: dict[str, Any], num: int, memory: float) -> bool:
    """The yardstick's own check: waits, one block at a time, memory added at starts."""
    block = {b["id"]: b for b in options["blocks"]}
    start = {(b["block"], b["micro_batch"]): b["start"] for b in answer["blocks"]}
    if len(start) != len(block) * num:
        return True
    for m in range(num):
        for a, b in options["deps"]:
            if start[a, m] + block[a]["time"] > start[b, m] + 1e-9:
                return True
    for device in range(options["ndevs"]):
        items = [(s, block[i]) for (i, _), s in start.items() if device in block[i]["devices"]]
        runs = sorted((s, s + b["time"], b["mem"]) for s, b in items)
        held = [sum(run[2] for run in runs[: k + 1]) for k in range(len(runs))]
        if any(x[1] > y[0] + 1e-9 for x, y in pairwise(runs)) or max(held, default=0) > memory:
            return True
    return False


def solver_import() -> float:
    """CPU seconds that the first use of the solver costs in a fresh process."""
    begin = time.process_time()
    from ortools.sat.python import cp_model  # noqa: F401

    return time.process_time() - begin


def seeds(first: int, last: int, imported: float) -> list[Row]:
    """Random placements, 8 micro-batches, little memory: legal, and proven or near the work."""
    right = met = least = 0
    cpu = []
    for seed in range(first, last + 1):
        options = placement(seed)
        memory = max(3, sum(b["mem"] for b in options["blocks"] if b["mem"] > 0))
        found = schedule(read(options), 8, memory)
        answer = json.loads(json.dumps(found.answer()))
        work = max(found.problem.work)
        near = answer["proven"] or answer["per_micro_batch"] <= 1.05 * work
        right += near and not illegal(answer, options, 8, memory)
        met += found.per_micro_batch == work
        least += found.makespan_gap == 0
        cpu.append(found.search_cpu + imported)  # one process each: every one pays for the import
    num = len(cpu)
    worst = max(sum(cpu[i : i + 20]) for i in range(0, num, 20))
    figure = f"{20 * sum(cpu) / num:.1f}, worst twenty {worst:.1f}"
    return [
        Row(f"random placements {first} to {last}: right", f"{right} of {num}", "all"),
        Row("period equals the busiest device's work", f"{met} of {num}"),
        Row("makespan of 8 proven minimal", f"{least} of {num}"),
        Row("CPU seconds for 20, the solver's import in each", figure, "≤ 30"),
    ]


def tessel() -> list[Row]:
    """Tessel's two phases on our solver, against the search, in this run."""
    rows = []
    for spec, memory in (("v", 4), ("x", 4), ("k", 6), ("m", 6), ("nn", 6), ("v", 3)):
        theirs = schedule(shape(spec), 8, memory, method="tessel", work=300)
        ours = schedule(shape(spec), 8, memory)
        said = [
            f"{s.per_micro_batch:.3g}, {s.makespan:g}, {s.search_cpu:.2f}" for s in (ours, theirs)
        ]
        rows.append(Row(f"{spec}, memory {memory}: period, makespan of 8, CPU s", *said))
    return rows


def rows(quick: bool) -> list[Row]:
    """The figures of every other benchmark's kind: quick ones, or all."""
    found = seeds(0, 19, solver_import()) + large() + tight()
    return found if quick else found + split(quick) + (shared() if TRUTH.exists() else [])


def main() -> None:
    if "--real" in sys.argv:
        show("Schedules: training, priced: step of ours, times as long of others", real.training())
        show("Schedules: inference, priced: latency", real.inference())
        return
    quick = "--quick" in sys.argv
    span = sys.argv[sys.argv.index("--seeds") + 1] if "--seeds" in sys.argv else "0-19"
    first, last = map(int, span.split("-"))
    show("Schedules: random placements", seeds(first, last, solver_import()))
    show("Schedules: large placements", large())
    show("Schedules: tight memory", tight())
    show("Schedules: backward split in two", split(quick))
    if TRUTH.exists():
        show("Schedules: shared placements: period, makespans of 8 and 128", shared())
    if "--tessel" in sys.argv:
        show("Schedules: Tessel's two phases on our solver", tessel())


if __name__ == "__main__":
    main()
