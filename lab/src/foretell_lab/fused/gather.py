"""Gathers measured regions and their kernels into one data set: columns, times and families.

first, op, dtype, elements, …   the columns of `foretell.cost.fused_regions.Regions`
written                         whether a row is a kernel as the compiler wrote it, or a region
measured, spread, kernels       of each row: seconds, quartile spread as a share, kernels
family                          the model each was cut from, or `drawn`
again                           the row that measured the same region before; -1 for none
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foretell.cost.fused_regions import NODE, WORDS, Regions, assembled, word_of
from foretell.errors import InputError
from foretell_lab.fused.columns import described
from foretell_lab.fused.data import Measured, read
from foretell_lab.fused.host import merged
from foretell_lab.fused.measure import read_regions
from foretell_lab.fused.pack import packed
from foretell_lab.fused.region import Region, loads
from foretell_lab.fused.written import parts

_WIDE = ("elements", "looped", "inner", "last", "writes", "flops")  # whole numbers up to 2**53
_LONG = 3e-5  # seconds: above it two choices of configurations cost the same within 14 %
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")


class Sample(NamedTuple):
    """One measured row."""

    nodes: list[tuple[Any, ...]]
    edges: list[tuple[int, int, int]]
    seconds: float
    spread: float
    kernels: int
    family: str
    key: str
    written: bool


def gather(
    pairs: Sequence[tuple[str, str]], out: Path, onto: Path | None = None, whole: bool = True,
    hurried: int = 0,
) -> int:  # fmt: skip
    """Join files of regions with files of results, after what `onto` holds; how many rows.

    A region measured by several files counts as the last of them has it. The first `hurried` files
    were measured with candidate configurations chosen by a clock that a slow host disturbs: of them
    only regions that take long are kept, and no kernels.
    Without `whole` only the kernels are kept: those of matmuls that the compiler wrote itself.
    """
    samples = [s for row in _latest(pairs, hurried) for s in _samples(*row, whole)]
    made = measured(samples)
    save(joined(read(onto.read_bytes()), made) if onto else made, out)
    return len(samples)


def measured_regions(pairs: Sequence[tuple[str, str]]) -> Measured:
    """The regions alone, without their kernels."""
    rows = _latest(pairs, 0)
    samples = [s for row in rows for s in _samples(*row, True) if not s.written]
    if not samples:
        raise InputError("nothing was measured", hint="the results tell why of each region")
    return measured(samples)


def _latest(pairs: Sequence[tuple[str, str]], hurried: int) -> list[tuple[Region, dict[str, Any]]]:
    """Regions with results, each as the last file has it; own times from any that has them."""
    found: dict[str, list[tuple[Region, dict[str, Any]]]] = {}
    alone: dict[str, list[float]] = {}
    for number, pair in enumerate(pairs):
        mine: dict[str, list[tuple[Region, dict[str, Any]]]] = {}
        for region, row in _results(*pair):
            if row.get("alone"):
                alone[region.key] = row["alone"]
            if number >= hurried or row["s"] >= _LONG:
                kept = row if number >= hurried else row | {"notes": []}
                mine.setdefault(region.key, []).append((region, kept))
        found |= mine
    return [
        (region, {"alone": alone.get(key)} | row) for key in found for region, row in found[key]
    ]


def _results(path: str, results: str) -> Iterator[tuple[Region, dict[str, Any]]]:
    lines = read_regions(path)
    raw = Path(results).read_bytes()
    text = gzip.decompress(raw) if results.endswith(".gz") else raw
    rows = [json.loads(line) for line in text.decode().splitlines()]
    if any("round" in row for row in rows):  # of a CPU; a file of one round has nothing to confirm
        rows = merged(rows, confirmed=any(row.get("round") for row in rows))
    for row in rows:
        if row.get("s", 0.0) > 0:
            yield loads(lines[row["at"]]), row


def _samples(region: Region, row: dict[str, Any], whole: bool) -> Iterator[Sample]:
    if whole:
        yield from _region(region, row)
    yield from _kernels(region, row)


def _region(region: Region, row: dict[str, Any]) -> Iterator[Sample]:
    """The whole region; none where a view of it needs a copy, which eager mode refuses."""
    alone = row.get("alone") or [math.nan] * len(region.ops)
    timing = row["s"], row["spread"], row["kernels"]
    with suppress(RuntimeError):
        nodes, edges = described(region, alone)
        yield Sample(nodes, edges, *timing, region.family, region.key, False)


def _kernels(region: Region, row: dict[str, Any]) -> Iterator[Sample]:
    """The kernels of a region, where as many ran as the compiler noted."""
    ran = [
        (name, seconds)
        for name, seconds in zip(row.get("names", ()), row.get("parts", ()), strict=False)
        if name.startswith("triton")
    ]
    notes = [n for n in row.get("notes", ()) if n["kind"] in ("loops", "template")]
    if len(ran) != len(notes) or any(_differs(*pair) for pair in zip(ran, notes, strict=True)):
        return
    first = bool(region.entries) and "float" in region.entries[0].dtype
    found = parts(row["notes"], [s for _, s in ran], "arg0_1" if first else "", _own(region, row))
    for i, part in enumerate(found):
        timing = part.seconds, row["spread"], 1, region.family, f"{region.key}/{i}"
        yield Sample(part.nodes, part.edges, *timing, True)


def _differs(ran: tuple[str, float], note: dict[str, Any]) -> bool:
    """Whether a kernel's name says it is of another sort than its note."""
    reduces = any(loop["how"] for loop in note.get("loops", ()))
    return note["kind"] == "loops" and reduces == ran[0].startswith("triton_poi")


def _own(region: Region, row: dict[str, Any]) -> float:
    """The time of a region's only product by itself."""
    alone = row.get("alone") or []
    own = [s for s, op in zip(alone, region.ops, strict=False) if word_of(op.name) in _PRODUCTS]
    return float(own[0]) if len(own) == 1 else math.nan


def measured(samples: list[Sample]) -> Measured:
    """Samples as columns."""
    regions = assembled([(s.nodes, s.edges) for s in samples])
    return Measured(
        replace(regions, written=np.array([s.written for s in samples])),
        np.array([s.seconds for s in samples]),
        np.array([s.spread for s in samples]),
        np.array([s.kernels for s in samples]),
        np.array([s.family for s in samples]),
        _again([s.key for s in samples]),
    )


def joined(one: Measured, other: Measured) -> Measured:
    """The rows of one data set after those of another."""
    a, b = one.regions, other.regions
    nodes: dict[str, Any] = {
        name: np.concatenate([getattr(a, name), getattr(b, name)]) for name in NODE
    }
    count = len(a.op)
    regions = Regions(
        np.concatenate([a.first, b.first[1:] + count]),
        source=np.concatenate([a.source, b.source + count]),
        target=np.concatenate([a.target, b.target + count]),
        pattern=np.concatenate([a.pattern, b.pattern]),
        written=np.concatenate([a.is_written, b.is_written]),
        **nodes,
    )
    again = np.where(other.again < 0, -1, other.again + len(one))
    return Measured(
        regions,
        np.concatenate([one.seconds, other.seconds]),
        np.concatenate([one.spread, other.spread]),
        np.concatenate([one.kernels, other.kernels]),
        np.concatenate([one.family, other.family]),
        np.concatenate([one.again, again]),
    )


def save(data: Measured, out: Path) -> None:
    """One compressed file of arrays: `.xz` takes half the room of `.npz`."""
    made = data.regions
    arrays: dict[str, Any] = {name: getattr(made, name) for name in NODE}
    arrays |= {name: arrays[name].astype(np.int64) for name in _WIDE}
    arrays["seconds"] = made.seconds.astype(np.float32)
    for name in ("op", "dtype", "across"):
        arrays[name] = arrays[name].astype(np.uint8)
    at = made.first[:-1][np.searchsorted(made.first, made.target, "right") - 1]
    arrays |= {
        "source": (made.source - at).astype(np.uint16),
        "target": (made.target - at).astype(np.uint16),
        "pattern": made.pattern.astype(np.uint8),
        "first": made.first.astype(np.int32),
        "edges": np.diff(np.searchsorted(made.target, made.first)).astype(np.uint16),
        "written": made.is_written,
        "measured": data.seconds.astype(np.float32),
        "spread": data.spread.astype(np.float32),
        "kernels": data.kernels.astype(np.uint8),
        "family": data.family,
        "again": data.again.astype(np.int32),
        "words": np.array(WORDS),
    }
    if out.suffix == ".xz":
        out.write_bytes(packed(arrays))
    else:
        np.savez_compressed(out, **arrays)


def _again(keys: list[str]) -> Any:
    seen: dict[str, int] = {}
    found = []
    for i, key in enumerate(keys):
        found.append(seen.get(key, -1))
        seen.setdefault(key, i)
    return np.array(found, np.int32)
