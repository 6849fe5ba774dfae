"""Fuzz every format for as long as wanted: `python -m tests.fuzz.fuzz --cases 1000 [FORMAT...]`.

Prints cases, tracebacks, hangs and what else was wrong, by format; keeps what broke a command in a
folder, with the command beside it. The same numbers make the same cases.
"""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.formats import CASE, formats, spec_case
from tests.fuzz.harness import problem, quietly, run


def one(name: str, number: int, folder: Path) -> tuple[list[str], str, int]:
    """Make and run one case; its command, what was wrong, and how it ended."""
    if name == "spec":
        argv = spec_case(number)
    else:
        form = formats()[name]
        raw, argv = form.case(number, name)
        path = folder / f"case{form.ending}"
        path.write_bytes(raw)
        word = f"./{path.name}"
        argv = [word if a == CASE else a for a in argv]
    found = run(argv, folder)
    return argv, problem(argv, found), found.code


def names() -> list[str]:
    """Everything that is fuzzed."""
    return [*formats(), "spec"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run many cases and say what came of them."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("formats", nargs="*", help="all where none is named")
    asked.add_argument("--cases", type=int, default=200, help="of each format")
    asked.add_argument("--first", type=int, default=0, help="number of the first case")
    asked.add_argument("--keep", type=Path, default=Path("fuzz-found"))
    given = asked.parse_args(argv)
    quietly()
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in given.formats or names():
            found = _many(name, given, Path(folder))
            total.update(found)
            print(name, dict(found), flush=True)
    print("all", dict(total))
    return 1 if total["cases"] > total["sound"] else 0


def _many(name: str, given: argparse.Namespace, folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    began = time.process_time()
    for number in range(given.first, given.first + given.cases):
        argv, wrong, code = one(name, number, folder)
        found["cases"] += 1
        found[_kind(wrong)] += 1
        found["refused"] += code == 2
        if wrong:
            _keep(given.keep, name, number, argv, wrong, folder)
    found["cpu_s"] = round(time.process_time() - began)
    return found


def _kind(wrong: str) -> str:
    if not wrong:
        return "sound"
    return "hang" if "still running" in wrong else "traceback" if "Traceback" in wrong else "other"


def _keep(keep: Path, name: str, number: int, argv: list[str], wrong: str, folder: Path) -> None:
    keep.mkdir(exist_ok=True)
    for path in folder.glob("case*"):
        (keep / f"{name}-{number}{''.join(path.suffixes)}").write_bytes(path.read_bytes())
    last = wrong.strip().splitlines()
    with open(keep / "FOUND.txt", "a") as file:
        print(f"{name} {number}: {shlex.join(argv)[:500]}\n  {last[-3:]}", file=file)


if __name__ == "__main__":
    os._exit(main())
