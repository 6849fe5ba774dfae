"""The command line of the bench: rows to a file, words to standard error.

    python -m foretell_lab.bench -o h200.csv --seconds 450 --shard 0/2

Beside OUT.csv go OUT.json (the machine), OUT.skipped.txt (what was not measured, and why) and
OUT.started.txt (what was begun, so that `--resume` passes over a case that ended the process).
Runs are joined by `--merge`, a table is summed up by `--summary`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from foretell.errors import ForetellError, InputError, unknown
from foretell.io import write_text
from foretell.spec import is_whole
from foretell_lab.bench.case import Case, parse_case
from foretell_lab.bench.table import Row, header_path, written

_SKIPPED, _STARTED = ".skipped.txt", ".started.txt"
_MARGIN, _SHARE = 12.0, 0.2  # seconds kept for the last profile to be read; of little time less


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 2 for a user's mistake."""
    given = _parser().parse_args(arguments)
    try:
        if given.summary:
            from foretell_lab.bench.digest import summary

            print(summary(given.summary))
        elif given.merge:
            from foretell_lab.bench.runs import merge

            merge(given.merge, Path(given.out))
        else:
            _measure(given)
    except ForetellError as why:
        print(why, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m foretell_lab.bench", description=__doc__)
    parser.add_argument("-o", "--out", default="bench.csv", help="where rows go")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1, cpu")
    parser.add_argument("--seconds", type=float, default=480.0, help="time limit")
    parser.add_argument("--shard", default="0/1", help="i/n: the i-th of n parts of the list")
    parser.add_argument("--only", default="", help="families or operators, by comma")
    parser.add_argument("--every", type=int, default=1, help="only each n-th group of cases")
    parser.add_argument("--longest", type=float, default=0.04, help="seconds one call may take")
    parser.add_argument("--part", choices=("all", "host", "device"), default="all")
    parser.add_argument("--cases", metavar="FILE", help="measure these, one a line, as printed")
    parser.add_argument("--resume", action="store_true", help="go on where a run was cut")
    verbs = parser.add_mutually_exclusive_group()
    verbs.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="join runs")
    verbs.add_argument("--summary", type=Path, metavar="FILE", help="print what a table tells")
    parser.add_argument("--quiet", action="store_true", help="no words but of errors")
    return parser


def _measure(given: argparse.Namespace) -> None:
    from foretell_lab.bench import machine, sweep
    from foretell_lab.bench.clock import place_for

    started = time.monotonic()
    place, out = place_for(given.device), Path(given.out)
    done = _done(out) if given.resume else set()
    cases = [c for c in _cases(given) if str(c) not in done]
    header = machine.describe(place) | {"ceilings": machine.ceilings(place), "shard": given.shard}
    _write_header(header, out)
    budget = sweep.Budget(
        started + left_for(given.seconds), given.longest, _memory(header), header["ceilings"]
    )
    log = _Log(out, given.resume, given.quiet)
    if given.part != "device":
        _measure_host(cases, place, budget if given.part == "host" else budget.part(0.4), log)
    if given.part != "host":
        sweep.sweep(log.begun(cases), place, budget, log.row)
    log.words(f"{log.rows} rows, {log.skipped} skipped, {time.monotonic() - started:.0f} s\n")
    header["ended"] = machine.device(place).get("nvidia_smi", {})
    _write_header(header, out)


def _measure_host(cases: list[Case], place: Any, budget: Any, log: _Log) -> None:
    """Everything that must be timed before a profiler runs, then what needs one."""
    from foretell_lab.bench import host, sweep
    from foretell_lab.bench.clock import Measured
    from foretell_lab.bench.host import kernel_rows, time_launches

    timed = host.time_chains(place, budget.part(0.5).ends)
    launches = time_launches(place)
    issued = sweep.time_issue(cases, place, budget.part(0.75))
    log.all((c, Measured(math.nan, math.nan, 0, seconds)) for c, seconds in issued.items())
    log.all(launches)
    log.all(host.rows(place, timed))
    log.all(kernel_rows(place))
    log.all(host.rows(place, host.time_profiled(place, budget.ends), "profiled"))


def _write_header(header: dict[str, Any], out: Path) -> None:
    write_text(header_path(out), json.dumps(header, indent=1) + "\n")


def _cases(given: argparse.Namespace) -> list[Case]:
    """What to measure, in order: a list in a file, or a part of the whole."""
    from foretell_lab.bench import ops, sweep

    if given.cases:
        lines = Path(given.cases).read_text(encoding="utf-8").splitlines()
        return [parse_case(line) for line in lines if line.strip()]
    wanted = [name for name in given.only.split(",") if name]
    every = list(ops.cases())
    known = {c.op for c in every} | set(ops.FAMILIES)
    for name in wanted:
        if name not in known:
            raise unknown("family or operator", name, known)
    chosen = [c for c in every if not wanted or {c.op, ops.family_of(c.op)} & set(wanted)]
    groups = sweep.shard(sweep.ordered(chosen)[:: given.every], *_shard(given.shard))
    return [c for group in groups for c in group]


def _shard(written: str) -> tuple[int, int]:
    index, slash, count = written.partition("/")
    if not (slash and is_whole(index) and is_whole(count) and 0 <= int(index) < int(count)):
        raise InputError(f"`{written}` is no shard", hint="write `0/2` for the first of two parts")
    return int(index), int(count)


def left_for(seconds: float) -> float:
    """Of a time limit, what measuring may take."""
    return seconds - min(_MARGIN, _SHARE * seconds)


def _memory(header: dict[str, Any]) -> float:
    """Bytes one chunk may hold: a third of the device, or 2 GB of the host."""
    return float(header["device"].get("memory", 6e9)) / 3


def _done(out: Path) -> set[str]:
    started = Path(f"{out}{_STARTED}")
    return set(started.read_text().splitlines()) if started.exists() else set()


class _Log:
    """Files that grow while a sweep runs, and progress messages."""

    def __init__(self, out: Path, goes_on: bool, is_quiet: bool = False) -> None:
        self.out, self.is_quiet = out, is_quiet
        self.rows = self.skipped = 0
        self._last_report = time.monotonic()
        for end in () if goes_on else ("", _SKIPPED, _STARTED):
            Path(f"{out}{end}").write_text("", encoding="utf-8")

    def row(self, case: Case, found: Any) -> None:
        """Keep one result, or why there is none."""
        if isinstance(found, str):
            self.skipped += 1
            self._append(_SKIPPED, f"{case}\t{found}\n")
        else:
            self.rows += 1
            self._append("", written(Row(case, **vars(found))))
        if time.monotonic() - self._last_report > 20:
            self._last_report = time.monotonic()
            self.words(f"{self.rows} rows, {self.skipped} skipped\n")

    def begun(self, cases: Iterable[Case]) -> Iterator[Case]:
        """The same cases, each written down before it is tried."""
        for case in cases:
            self._append(_STARTED, f"{case}\n")
            yield case

    def all(self, results: Iterable[tuple[Case, Any]]) -> None:
        """Keep every result."""
        for case, found in results:
            self.row(case, found)

    def words(self, text: str) -> None:
        """Print a progress message."""
        if not self.is_quiet:
            print(text, end="", file=sys.stderr, flush=True)

    def _append(self, end: str, line: str) -> None:
        with Path(f"{self.out}{end}").open("a", encoding="utf-8") as file:
            file.write(line)
