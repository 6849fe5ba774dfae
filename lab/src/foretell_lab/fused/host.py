"""Measures regions on one core of a CPU: one process compiles ahead, another owns the core.

A region is read in rounds some minutes apart until two rounds agree within a tenth; where four do
not, it is left out (→ `merged`). Results are appended line by line, and regions that a file has
settled are not run again:

    {"at": 17, "round": 0, "s": 1.2e-04, "loops": 2, "alone": [4e-05, 8e-05]}

`at` is the region's line, `loops` its loop nests, `alone` the seconds of its ops un-fused. How a
reading is taken: → `host_clock`.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from foretell_lab.fused import host_build
from foretell_lab.fused.host_build import Block, Run
from foretell_lab.fused.host_clock import LONGEST, TINY, Clock, Item, op_items, region_item
from foretell_lab.fused.measure import read_regions
from foretell_lab.fused.region import Region, loads

AGREE = 0.1  # rounds further apart do not confirm one another
ROUNDS = 4  # of which two must agree
_BLOCK = 24  # regions of one library
_AHEAD = 3  # blocks compiled before the measuring process asks for them
_APART = 120.0  # seconds between two rounds of one region
_LATE = 60.0  # seconds after its end that a run waits for what is in hand
_READINGS = 5, 12  # fewest and most of a region in one round
_ALONE = 3, 5  # of an op alone
_GROUP = 3 << 29  # bytes of the tensors held at a time
# glibc as it settles in a long run: blocks up to 32 MiB come from a heap that keeps its pages,
# larger ones are mapped anew, page by page (mallopt(3), M_MMAP_THRESHOLD).
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


@dataclass(frozen=True)
class HostJob:
    """What both processes are given."""

    path: str
    out: str
    ends: float  # by the wall clock
    core: int = 0
    alone: bool = True
    rounds: int = 2  # at least; more where they do not agree


@dataclass
class OpenBlock:
    """A block in hand: its runs, what was read, the rounds done, and when the last one ended."""

    block: Block
    runs: dict[int, Run]
    read: dict[int, list[float]] = field(default_factory=dict)
    rounds: int = 0
    ended: float = 0.0


def measure_host(job: HostJob) -> None:
    """Measure until the file is done or the time is up."""
    context = multiprocessing.get_context("spawn")
    before = {name: os.environ.get(name) for name in (*_MALLOC, "OMP_NUM_THREADS")}
    os.environ.update(_MALLOC, OMP_NUM_THREADS="1")
    blocks: Any = context.Queue(_AHEAD)
    workers = [context.Process(target=work, args=(job, blocks)) for work in (_compile, _measure)]
    try:
        for worker in workers:
            worker.start()
        workers[1].join(max(1.0, job.ends + _LATE - time.time()))
    finally:
        for worker in workers:
            worker.terminate()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _compile(job: HostJob, blocks: Any) -> None:
    """One process: blocks of regions compiled, the next one while the last is being built."""
    host_build.settle()
    lines, settled = read_regions(job.path), {row["at"] for row in merged(read_rows(job.out))}
    jobs = [(-1, TINY), *((i, loads(x)) for i, x in enumerate(lines) if i not in settled)]
    gc.disable()  # a third of the time of tracing; what is left over is swept once a block
    with ThreadPoolExecutor(1) as builder:
        waiting: list[tuple[Block, Any]] = []
        for at in range(0, len(jobs), _BLOCK):
            block = host_build.wrapped(jobs[at : at + _BLOCK])
            waiting.append((block, host_build.build(block, builder.submit)))
            if len(waiting) > 1:
                _hand_over(*waiting.pop(0), blocks)
            gc.collect()
        for block, library in waiting:
            _hand_over(block, library, blocks)
    blocks.put(None)
    blocks.close()
    blocks.join_thread()


def _hand_over(block: Block, library: Callable[[], Any], blocks: Any) -> None:
    """A block once its library is built; one that cannot be built is left out."""
    with suppress(RuntimeError):
        library()
        blocks.put(block)


def _measure(job: HostJob, blocks: Any) -> None:
    """The other process: a round of each block as it comes, further rounds some minutes later."""
    with suppress(OSError):  # a core this process may not have: it stays where it is
        os.sched_setaffinity(0, {job.core})
    host_build.settle()
    reader = Reader(job)
    held: list[OpenBlock] = []
    more = True
    while (more or held) and time.time() < job.ends:
        due = _due(held, more)
        if due is not None:
            reader.round(due)
            held.remove(due)
            held += [due] if _is_unsettled(due, job) else []
        elif more:
            with suppress(Empty):
                block = blocks.get(timeout=2.0)
                more = block is not None
                held += [reader.taken(block)] if more else []
        else:
            time.sleep(1.0)


def _due(held: Sequence[OpenBlock], more: bool) -> OpenBlock | None:
    """The block to read next: one not read yet, else the one read longest ago."""
    if not held:
        return None
    first = min(held, key=lambda h: (h.rounds > 0, h.ended))
    waited = time.time() - first.ended
    return first if waited > _APART or (not more and waited > _APART / 4) else None


def _is_unsettled(held: OpenBlock, job: HostJob) -> bool:
    """Drop from a block what needs no further round; whether anything is left."""
    for at, read in held.read.items():
        enough = len(read) >= job.rounds and (job.rounds < 2 or agreed(read) is not None)
        if enough or min(read) > LONGEST or len(read) >= ROUNDS:
            held.runs.pop(at, None)
    return bool(held.runs)


class Reader:
    """Reads blocks and notes what it finds."""

    def __init__(self, job: HostJob) -> None:
        self.job, self.clock = job, Clock()
        self.lines = read_regions(job.path)
        self.known: dict[str, float] = {}  # seconds of ops alone

    def taken(self, block: Block) -> OpenBlock:
        """A block, its library loaded."""
        runs = host_build.runs(block, host_build.build(block)())
        self.clock.tiny = runs.pop(-1, self.clock.tiny)
        return OpenBlock(block, runs)

    def round(self, held: OpenBlock) -> None:
        """Read every region of a block once more and note it."""
        rows = [{"at": r.at, "why": r.why} for r in held.block.rows if r.why and not held.rounds]
        left = list(held.runs)
        while left and time.time() < self.job.ends:
            done, found = self._group(held, left)
            left = left[done:]
            rows += found
        with open(self.job.out, "a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
        held.rounds, held.ended = held.rounds + 1, time.time()
        gc.collect()

    def _group(self, held: OpenBlock, wanted: Sequence[int]) -> tuple[int, list[dict[str, Any]]]:
        """As many regions as memory holds, by turns: how many, and a row of each."""
        loops = {row.at: row.loops for row in held.block.rows}
        rows: dict[int, dict[str, Any]] = {}
        whole: dict[int, Item] = {}
        alone: dict[int, list[tuple[str, Item]]] = {}
        for at in wanted:
            rows[at] = {"at": at, "round": held.rounds, "loops": loops[at]}
            try:
                whole[at], alone[at] = self._items(at, held.runs[at], first=not held.rounds)
            except (RuntimeError, NotImplementedError) as why:
                rows[at]["why"] = f"{type(why).__name__}: {str(why)[:160]}"
                del held.runs[at]
            if sum(i.moved for i in chain(whole.values(), *_plain(alone))) > _GROUP:
                break
        with torch.no_grad():
            self.clock.passes(list(whole.values()), *_READINGS)
            self._read_alone(alone)
        for at, item in whole.items():
            rows[at] |= self._timings(item, [name for name, _ in alone[at]])
            held.read.setdefault(at, []).append(item.read[0])
        return len(rows), list(rows.values())

    def _items(self, at: int, run: Run, *, first: bool) -> tuple[Item, list[tuple[str, Item]]]:
        region: Region = loads(self.lines[at])
        entries = [self.clock.entry(e) for e in region.entries]
        with torch.no_grad():
            item, each = region_item(at, run, entries, run(list(entries))), []
            if self.job.alone and first:
                with suppress(RuntimeError, NotImplementedError):  # what eager mode cannot run
                    each = op_items(at, region, entries)
        return item, each

    def _read_alone(self, alone: dict[int, list[tuple[str, Item]]]) -> None:
        """Ops alone: first one of each region, then the next, so that their data grows cold."""
        new: dict[str, Item] = {}
        for some in zip_longest(*alone.values()):
            for name, item in filter(None, some):
                if name not in self.known:
                    new.setdefault(name, item)
        self.clock.passes(list(new.values()), *_ALONE)
        self.known |= {name: item.read[0] for name, item in new.items()}

    def _timings(self, item: Item, names: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {"s": _short(item.read[0]), "readings": len(item.read)}
        return found | ({"alone": [_short(self.known[n]) for n in names]} if names else {})


def _plain(alone: dict[int, list[tuple[str, Item]]]) -> list[list[Item]]:
    return [[item for _, item in some] for some in alone.values()]


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def read_rows(path: str) -> list[dict[str, Any]]:
    """The lines of a file of results; none where it does not exist."""
    found = Path(path)
    return [json.loads(x) for x in found.read_text().splitlines()] if found.is_file() else []


def agreed(read: Sequence[float]) -> float | None:
    """The least of some rounds where another confirms it: how far apart; none where none does."""
    if len(read) < 2:
        return None
    least, following = sorted(read)[:2]
    return following / least - 1 if following <= least * (1 + AGREE) else None


def merged(rows: Sequence[dict[str, Any]], *, confirmed: bool = True) -> list[dict[str, Any]]:
    """One row a region from those of its rounds; `confirmed` drops what no second one bears out."""
    by_region: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if 0 < row.get("s", 0.0) <= LONGEST:
            by_region.setdefault(row["at"], []).append(row)
    found = []
    for at, mine in by_region.items():
        apart = agreed([row["s"] for row in mine])
        if apart is not None or not confirmed:
            merged_row = {
                "at": at,
                "s": min(row["s"] for row in mine),
                "spread": round(apart or 0.0, 4),
            }
            merged_row |= {"kernels": mine[0]["loops"], "alone": _least_of(mine)}
            found.append(merged_row | {"notes": []})  # a CPU's nests are not taken apart
    return found


def _least_of(rows: Sequence[dict[str, Any]]) -> list[float] | None:
    """Each op's own time: the least of the rounds."""
    times = [row["alone"] for row in rows if row.get("alone")]
    return [min(s) for s in zip(*times, strict=True)] if times else None
