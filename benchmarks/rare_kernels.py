"""Kernels of which the table of measured operators has few rows: measured, or folded in.

    python benchmarks/rare_kernels.py OUT.csv [--seconds 440]      measure, on an H200
    python benchmarks/rare_kernels.py --fold OUT.csv               rows into cost/tables/traced_h200

Recurrent stacks, 1-D convolutions, convolutions over volumes, transposed ones: the cases of
`foretell bench` of these kinds that neither table has, all formats of a shape together, kinds in
turn, so that a run that is cut short has some of each. A stack of both directions is folded in as
one of twice its layers, as what-ifs ask for it.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

from foretell.io import write_atomically
from foretell_lab.bench.case import Case, case, read_case, text
from foretell_lab.bench.command import main as bench
from foretell_lab.bench.ops import conv, recurrent

TABLES = Path(__file__).parents[1] / "src/foretell/cost/tables"
TRACED = TABLES / "traced_h200.csv.gz"
COLUMNS = ("op", "direction", "dtype", "layout", "shape", "device_seconds", "spread", "kernels")
LONGEST = 0.15  # seconds of one call: stacks of recurrent layers in fp32 take long
NEAR = 0.01  # of a size, within which two shapes are one
Key = tuple[str, str, str, str, frozenset[tuple[str, int | str]]]


def main() -> None:
    """Measure or fold in."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=440.0)
    parser.add_argument("--fold", action="store_true")
    given = parser.parse_args()
    if given.fold:
        print(fold(given.out), "rows added")
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    listed = given.out.with_suffix(".cases.txt")
    listed.write_text("".join(f"{c}\n" for c in wanted()))
    limit = ["--part", "device", "--longest", str(LONGEST), "--seconds", str(given.seconds)]
    bench(["--cases", str(listed), "-o", str(given.out), *limit])


def wanted() -> Iterator[Case]:
    """What no table has: a shape of each kind in turn."""
    known = {key(c) for c in tabled()}
    kinds: dict[str, dict[str, list[Case]]] = {}
    for options in [*recurrent.cases(), *conv.cases()]:
        kind = kind_of(options)
        if kind and key(options) not in known:
            kinds.setdefault(kind, {}).setdefault(text(options.shape), []).append(options)
    for groups in zip_longest(*(shapes.values() for shapes in kinds.values())):
        yield from (c for group in groups for c in group or ())


def kind_of(options: Case) -> str:
    """The kind of a case that is rare in the tables; empty where it is none."""
    if options.op in ("lstm", "gru"):
        return options.op
    if options.layout != "nchw" or options.dtype == "fp16":
        return ""
    if options.op == "conv2d":
        return "line" if options["h"] == 1 < options["w"] else ""
    return options.op


def tabled() -> Iterator[Case]:
    """Every case of both tables."""
    for path in (TABLES / "measured/h200.csv.gz", TRACED):
        with gzip.open(path, "rt", newline="") as file:
            yield from (read_case(row) for row in csv.DictReader(file))


def key(options: Case) -> Key:
    """A case as a what-if asks for it, whatever the order of its sizes."""
    return (
        options.op,
        options.direction,
        options.dtype,
        options.layout,
        frozenset(stacked(options).shape),
    )


def stacked(options: Case) -> Case:
    """A stack of both directions as one of twice its layers; the width of its input is left out."""
    if options.op not in ("lstm", "gru"):
        return options
    sizes = {name: size for name, size in options.shape if name not in ("both", "c")}
    sizes["layers"] = options["layers"] * (1 + options.size("both", 0))
    return case(options.op, options.direction, options.dtype, options.layout, **sizes)


def fold(path: Path) -> int:
    """Add rows that were measured to those read off traces; how many are new.

    A row of a step says what the kernel takes there: where one is as good as the same shape, what
    was measured apart from any step is left out.
    """
    with gzip.open(TRACED, "rt", newline="") as file:
        rows = [tuple(row[c] for c in COLUMNS) for row in csv.DictReader(file)]
    known = list(tabled())
    before = len(rows)
    for row in measured(path):
        options = stacked(read_case(row))
        if not any(is_alike(options, other) for other in known):
            rest = (row["device_seconds"], row["spread"], row["kernels"])
            names = (
                options.op,
                options.direction,
                options.dtype,
                options.layout,
                text(options.shape),
            )
            rows.append((*names, *rest))
    save(sorted(rows))
    return len(rows) - before


def is_alike(a: Case, b: Case) -> bool:
    """Whether two cases are one but for a hundredth of some size."""
    if key(a)[:4] != key(b)[:4]:
        return False
    mine, other = (dict(stacked(c).shape) for c in (a, b))
    return all(
        abs(float(mine.get(k, 1)) / float(other.get(k, 1)) - 1) <= NEAR for k in {*mine, *other}
    )


def measured(path: Path) -> Iterator[dict[str, str]]:
    """Rows of a run that say how long the device took."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file, fieldnames=(*COLUMNS, "host_seconds", "kernel", "clock")):
            if row["device_seconds"]:
                yield row


def save(rows: Iterable[tuple[str, ...]]) -> None:
    """The table, the same bytes for the same rows."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    packed = gzip.compress(out.getvalue().encode(), 9, mtime=0)
    write_atomically(TRACED, lambda file: file.write(packed))


if __name__ == "__main__":
    main()
