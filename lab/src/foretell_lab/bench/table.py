"""Measured rows as text: a CSV, compressed where its name ends in .gz, and a JSON beside it.

    op,direction,dtype,layout,shape,device_seconds,spread,kernels,host_seconds

Seconds carry four significant digits, which is finer than they repeat. While a sweep runs, rows
are appended as they come, with the longest kernel's name and the clock as further columns, and a
case may stand in several (measured again; host and device timed apart);
`foretell_lab.bench` joins them.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.io import write_atomically, write_text
from foretell_lab.bench.case import Case, read_case, text

COLUMNS = ["op", "direction", "dtype", "layout", "shape"]
COLUMNS += ["device_seconds", "spread", "kernels", "host_seconds"]


@dataclass(frozen=True)
class Row:
    """One measured case; seconds that were not measured are not a number."""

    case: Case
    seconds: float
    spread: float
    kernels: int
    host: float
    kernel: str = ""
    clock: float = math.nan


def written(row: Row) -> str:
    """One line of a growing table, the kernel's name too."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([*_fields(row), row.kernel, short(row.clock, 4)])
    return line.getvalue()


def save(rows: Iterable[Row], header: dict[str, Any], path: Path) -> None:
    """A table and its header beside it; the same rows give the same bytes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_fields(row) for row in rows)
    raw = out.getvalue().encode()
    packed = gzip.compress(raw, 9, mtime=0) if path.suffix == ".gz" else raw
    write_atomically(path, lambda file: file.write(packed))
    write_text(header_path(path), json.dumps(header, indent=1, ensure_ascii=False) + "\n")


def load(path: Path) -> list[Row]:
    """The rows of a table."""
    if not path.exists():
        raise InputError(
            f"no measured table at `{path}`", hint="run `python -m foretell_lab.bench`"
        )
    return list(_rows(path))


def load_header(path: Path) -> dict[str, Any]:
    """What stands beside a table; empty where nothing does."""
    beside = header_path(path)
    found: dict[str, Any] = json.loads(beside.read_text()) if beside.exists() else {}
    return found


def header_path(path: Path) -> Path:
    """`h200.csv.gz` → `h200.json`."""
    return path.with_name(path.name.removesuffix(".gz").removesuffix(".csv") + ".json")


def _rows(path: Path) -> Iterator[Row]:
    raw = path.read_bytes()
    plain = gzip.decompress(raw).decode() if path.suffix == ".gz" else raw.decode()
    lines = csv.reader(io.StringIO(plain))
    for number, fields in enumerate(lines, 1):
        if fields[: len(COLUMNS)] == COLUMNS:
            continue
        try:
            yield _row(fields)
        except (ValueError, KeyError, InputError) as why:
            raise InputError(f"`{path}` line {number} is no measured row: {why}") from None


def _row(fields: list[str]) -> Row:
    if len(fields) < len(COLUMNS):
        raise InputError(f"{len(fields)} fields where {len(COLUMNS)} are needed")
    named = dict(zip(COLUMNS, fields, strict=False))
    return Row(
        read_case(named),
        _number(named["device_seconds"]),
        _number(named["spread"]),
        int(named["kernels"]),
        _number(named["host_seconds"]),
        fields[9] if len(fields) > 9 else "",
        _number(fields[10]) if len(fields) > 10 else math.nan,
    )


def _number(field: str) -> float:
    return float(field) if field else math.nan


def _fields(row: Row) -> list[str]:
    c = row.case
    measured = [short(row.seconds, 4), short(row.spread, 2), str(row.kernels), short(row.host, 4)]
    return [c.op, c.direction, c.dtype, c.layout, text(c.shape), *measured]


def short(value: float, digits: int) -> str:
    """A number in few digits; nothing for what is not a number."""
    return "" if math.isnan(value) else f"{value:.{digits}g}"
