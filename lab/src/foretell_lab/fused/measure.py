"""Measures a file of regions on a GPU: many processes compile, one at a time owns its clock.

Each process takes the next block of regions, compiles them all, then waits for its turn on the
device, where it runs every region and every op alone. Results are appended line by line, so a run
cut short keeps what it has:

    {"at": 17, "s": 1.2e-05, "spread": 0.02, "kernels": 1, "alone": [0.0, 8e-06, ...]}

`at` is the region's line, `alone` the seconds of its ops un-fused, `parts` those of its kernels and
`notes` what the compiler said of each (→ `kernels`). Where a region could not be compiled or run,
`why` tells. On a CPU: → `host`.
"""

from __future__ import annotations

import gc
import gzip
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretell_lab.fused.build import compiled, decoded, operator, real_entry
from foretell_lab.fused.clock import _ALONE, DeviceClock, quicken, wake
from foretell_lab.fused.kernels import Note, noted
from foretell_lab.fused.region import Region, loads, references
from foretell_lab.fused.templates import own_products

Tensor = Any
_DEAD = 90.0  # seconds
_LATE = 40.0  # seconds after its end that a run waits for processes still at work
_LOST = 3  # the exit status of a process that lost its device
BLOCK = 24  # regions a process compiles before its turn on the device


@dataclass(frozen=True)
class Job:
    """What every process is given."""

    path: str
    out: str
    device: str
    ends: float  # by the wall clock
    alone: bool = True
    products: bool = False  # the compiler writes matmuls itself


@dataclass(frozen=True)
class Ready:
    """A region compiled, what the compiler said of its kernels, or why it could not be."""

    region: Region
    run: Callable[[list[Tensor]], Any] | None
    notes: list[Note]
    why: str = ""


def measure(job: Job, processes: int) -> None:
    """Measure until the file is done or the time is up."""
    context = multiprocessing.get_context("spawn")
    shared = context.Lock(), context.Lock(), context.Value("i", 0)
    workers = [context.Process(target=work, args=(job, *shared)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    while workers:
        worker = workers.pop()
        worker.join(max(1.0, job.ends + _LATE - time.time()))
        if worker.is_alive():
            worker.terminate()
        elif worker.exitcode and time.time() < job.ends:
            workers.append(context.Process(target=work, args=(job, *shared)))
            workers[-1].start()


def read_regions(path: str) -> list[str]:
    """The lines of a file of regions."""
    raw = Path(path).read_bytes()
    return (gzip.decompress(raw) if path.endswith(".gz") else raw).decode().splitlines()


def work(job: Job, turn: Any, writing: Any, next_block: Any) -> None:
    """One process: blocks of regions until nothing is left."""
    settle(job.device)
    if job.products:
        own_products()
    lines = read_regions(job.path)
    clock: DeviceClock | None = None
    known: dict[str, float] = {}
    gc.freeze()
    for at in _blocks(next_block, len(lines), job.ends):
        gc.disable()  # looking for cycles is a quarter of what the compiler's Python takes
        ready = dict(_compiled(lines, at, job))
        gc.enable()
        with my_turn(turn):
            if clock is None:
                clock = clock_for_gpu()
            rows, untimed = timed(ready, clock, job, known)
        _fill(rows, untimed, clock, known)
        with my_turn(writing), open(job.out, "a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
        del ready
        gc.collect()


@contextmanager
def my_turn(turn: Any) -> Iterator[None]:
    """Hold the device; a holder that has not let go for long is taken to be dead."""
    turn.acquire(timeout=_DEAD)
    try:
        yield
    finally:
        with suppress(ValueError):
            turn.release()


def settle(device: str) -> None:
    """One thread a process, nothing kept from earlier runs, the device awake."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    inductor.fx_graph_cache = False
    inductor.autotune_local_cache = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    if device == "cuda":
        quicken()
        wake()


def clock_for_gpu() -> DeviceClock:
    """The clock of this process's GPU."""
    return DeviceClock(torch.cuda.get_device_properties(0).L2_cache_size)


def _blocks(next_block: Any, count: int, ends: float) -> Iterator[range]:
    while time.time() < ends:
        with next_block.get_lock():
            start = next_block.value * BLOCK
            next_block.value += 1
        if start >= count:
            return
        yield range(start, min(start + BLOCK, count))


def _compiled(lines: list[str], at: range, job: Job) -> Iterator[tuple[int, Ready]]:
    for i in at:
        if time.time() > job.ends:
            return
        region = loads(lines[i])
        try:
            with noted() as notes:
                run = compiled(region, job.device)
            yield i, Ready(region, run, notes)
        except Exception as why:  # a compiler fails in many ways; the region is left out
            yield i, Ready(region, None, [], _first_line(why))


def timed(
    ready: dict[int, Ready], clock: DeviceClock, job: Job, known: dict[str, float],
) -> tuple[list[dict[str, Any]], list[tuple[dict[str, Any], str]]]:  # fmt: skip
    """Run a block: a row each, and whose time each reading is; ops met before are not run again."""
    rows: list[dict[str, Any]] = []
    untimed: list[tuple[dict[str, Any], str]] = []  # the row, and the op whose time it is
    _choose(ready, job)
    with clock:
        for at, made in ready.items():
            row: dict[str, Any] = {"at": at}
            rows.append(row)
            if made.run is None:
                row["why"] = made.why
                continue
            row["notes"] = made.notes
            try:
                _record(made.region, made.run, clock, job, row, untimed, known)
            except RuntimeError as why:
                row["why"] = _first_line(why)
                _check_alive(job.device)
    return rows, untimed


def _choose(ready: dict[int, Ready], job: Job) -> None:
    """Run each region once, so that the compiler chooses its configurations, unwatched."""
    for made in ready.values():
        if made.run is not None and job.device == "cuda":
            with suppress(RuntimeError), torch.no_grad():
                made.run([real_entry(e, job.device) for e in made.region.entries])


def _record(
    region: Region, run: Callable[[list[Tensor]], Any], clock: DeviceClock, job: Job,
    row: dict[str, Any], untimed: list[tuple[dict[str, Any], str]], known: dict[str, float],
) -> None:  # fmt: skip
    entries = [real_entry(e, job.device) for e in region.entries]
    first = entries[0] if entries else None
    fresh = first if first is not None and first.is_floating_point() and owns(first) else None
    moved = float(sum(t.numel() * t.element_size() for t in entries))
    with torch.no_grad():
        clock.record(lambda: run(list(entries)), fresh, moved)
        untimed.append((row, ""))
        if job.alone:
            try:
                row["alone"] = _record_alone(region, entries, clock, job, row, untimed, known)
            except (RuntimeError, NotImplementedError) as why:  # an op eager mode cannot run here
                row["alone_why"] = _first_line(why)
                _check_alive(job.device)


def _record_alone(
    region: Region, entries: list[Tensor], clock: DeviceClock, job: Job,
    row: dict[str, Any], untimed: list[tuple[dict[str, Any], str]], known: dict[str, float],
) -> list[str]:  # fmt: skip
    """Run each op alone; the names under which their times will be known."""
    values: list[Any] = list(entries)
    names = []
    for op in region.ops:
        args, kwargs = (
            decoded(a, lambda r: value_of(values, r), job.device) for a in (op.args, op.kwargs)
        )
        function = operator(op.name)
        values.append(function(*args, **kwargs))
        name = name_of(op.name, op.args, op.kwargs, values)
        names.append(name)
        if name not in known:
            known[name] = math.nan
            reads = [value_of(values, [0, v, r]) for v, r in references([op.args, op.kwargs])]
            fresh = next((t for t in reads if t.is_floating_point() and owns(t)), None)
            moved = float(sum(t.numel() * t.element_size() for t in reads))
            clock.record(partial(function, *args, **kwargs), fresh, moved, _ALONE)
            untimed.append((row, name))
    return names


def _check_alive(device: str) -> None:
    """End this process where the device's context is lost, so that a fresh one takes over."""
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise SystemExit(_LOST) from None


def owns(t: Tensor) -> bool:
    """Whether a tensor can be written in place: nothing in it is expanded."""
    return all(s or n == 1 for n, s in zip(t.shape, t.stride(), strict=True))


def value_of(values: list[Any], reference: Any) -> Any:
    value = values[reference[1]]
    return value if reference[2] < 0 else value[reference[2]]


def name_of(op: str, args: Any, kwargs: Any, values: list[Any]) -> str:
    """What tells the cost of an op: itself, its plain arguments, how its tensors lie."""

    def reported(reference: Any) -> str:
        t = value_of(values, reference)
        return f"{tuple(t.shape)}{t.stride()}{t.dtype}"

    return f"{op}{decoded(args, reported, 'cpu')}{decoded(kwargs, reported, 'cpu')}"


def _fill(
    rows: list[dict[str, Any]], untimed: list[tuple[dict[str, Any], str]],
    clock: DeviceClock, known: dict[str, float],
) -> None:  # fmt: skip
    readings = clock.read()
    if not readings:
        for row in rows:
            row.setdefault("why", "the profiler lost kernels")
    for (row, name), reading in zip(untimed, readings, strict=False):
        if name:
            known[name] = reading.seconds
        else:
            row.update(s=_short(reading.seconds), spread=round(reading.spread, 3))
            row.update(kernels=reading.kernels, names=reading.names)
            row.update(parts=[_short(s) for s in reading.parts])
    for row in rows:
        if "alone" in row:
            row["alone"] = [_short(known.get(name, math.nan)) for name in row["alone"]]


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _first_line(why: BaseException) -> str:
    text = str(why).strip()
    return f"{type(why).__name__}: {text.splitlines()[0][:160]}" if text else type(why).__name__
