"""Fuzz every format for as long as wanted: `python -m tests.fuzz.fuzz --cases 1000 [FORMAT...]`.

Prints cases, tracebacks, hangs and what else was wrong, by format; keeps what broke a command in a
folder, with the command beside it. The same numbers make the same cases. `--readers` asks what
reads each format instead of the commands: many times as many cases a second.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.fuzz.formats import CASE, GUIDE, PREDICT, formats, spec_case
from tests.fuzz.harness import problem, quietly, run
from tests.fuzz.readers import read

BATCH = 200  # cases of one process
MEMORY = 1 << 30  # that no case may add to what is held
Ask = Callable[[str, int, Path], tuple[list[str], str, int]]  # format, number, folder → outcome


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
    query = argparse.ArgumentParser(description=__doc__)
    query.add_argument("formats", nargs="*", help="all where none is named")
    query.add_argument("--cases", type=int, default=200, help="of each format")
    query.add_argument("--first", type=int, default=0, help="number of the first case")
    query.add_argument("--readers", action="store_true", help="no commands, only readers")
    query.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    query.add_argument("--keep", type=Path, default=Path("fuzz-found"))
    given = query.parse_args(argv)
    quietly()
    _warmed()
    chosen, began = given.formats or names(), time.monotonic()
    counts = {name: Counter[str]() for name in chosen}
    batches = _batches(chosen, given)
    wanted = Counter(name for name, numbers in batches for _ in numbers)
    for name, found in _shared(read if given.readers else one, batches, given):
        counts[name].update(found)
        if counts[name]["cases"] == wanted[name]:
            print(name, dict(counts[name]), flush=True)
    total = sum(counts.values(), Counter[str]())
    pace = total["cases"] / max(time.monotonic() - began, 1e-9)
    cpu = total.pop("cpu_ms") / 1000
    print("all", dict(total), f"{cpu:.0f} CPU-s, {pace:.0f} cases a second")
    return 1 if total["cases"] > total["sound"] else 0


def _warmed() -> None:
    """Load what most commands need, so that processes forked from this one have it."""
    with tempfile.TemporaryDirectory() as folder:
        run([*PREDICT, "--plan", "dp=8,global_batch=8", "--json"], Path(folder))
        run(["whatif", str(GUIDE), "faster:op=gemm,times=2", "--json"], Path(folder))
        run(["report", str(GUIDE), "--no-advice", "--json"], Path(folder))


def _batches(chosen: Sequence[str], given: argparse.Namespace) -> list[tuple[str, range]]:
    """Numbers of each format; fewer of those whose sound cases take long."""
    found, size = [], BATCH * (20 if given.readers else 1)
    for name in chosen:
        form = formats().get(name)  # none of `spec`
        cost = (form.reading if given.readers else form.cost) if form else 1
        end = given.first + max(1, given.cases // cost)
        found += [(name, range(k, min(k + size, end))) for k in range(given.first, end, size)]
    return found


def _shared(
    ask: Ask, batches: list[tuple[str, range]], given: argparse.Namespace
) -> Iterator[tuple[str, Counter[str]]]:
    """What came of each batch; each runs in a process of its own, which may die of it."""
    fork = multiprocessing.get_context("fork")
    waiting, running, keep = batches[::-1], {}, given.keep.absolute()
    while waiting or running:
        while waiting and len(running) < given.jobs:
            name, numbers = waiting.pop()
            mine, theirs = fork.Pipe(duplex=False)
            made = fork.Process(target=_batch, args=(ask, name, numbers, keep, theirs))
            made.start()
            theirs.close()
            running[mine] = (made, name, numbers, Counter[str]())
        for ready in wait(list(running)):
            made, name, numbers, found = running[ready]
            try:
                found.update(ready.recv())
            except EOFError:
                del running[ready]
                made.join()
                if made.exitcode:
                    number = numbers[found["cases"]]
                    _note(keep, f"{name} {number}: the process ended with {made.exitcode}")
                    found.update(cases=1, died=1)
                    if rest := numbers[found["cases"] :]:
                        waiting.append((name, rest))
                yield name, found


def _batch(ask: Ask, name: str, numbers: range, keep: Path, pipe: Connection) -> None:
    """Run some cases; tell of each how it ended."""
    with tempfile.TemporaryDirectory(dir=_quick()) as folder, contextlib.chdir(folder):
        for number in numbers:
            began, peak = time.process_time(), _peak()
            argv, wrong, code = ask(name, number, Path(folder))
            if not wrong and _peak() > peak + MEMORY:
                wrong = f"took {(_peak() - peak) >> 20} MiB"
            if wrong:
                _keep(keep, name, number, argv, wrong, Path(folder))
            spent = round(1000 * (time.process_time() - began))
            pipe.send({"cases": 1, _kind(wrong): 1, "refused": int(code == 2), "cpu_ms": spent})
    pipe.close()
    os._exit(0)


def _quick() -> str | None:
    """A folder in memory, where there is one: opening a file on a disk takes milliseconds."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _kind(wrong: str) -> str:
    if not wrong:
        return "sound"
    return (
        "hang" if wrong.startswith("still ") else "traceback" if "Traceback" in wrong else "other"
    )


def _keep(keep: Path, name: str, number: int, argv: list[str], wrong: str, folder: Path) -> None:
    keep.mkdir(exist_ok=True)
    for path in folder.glob("case*"):
        (keep / f"{name}-{number}{''.join(path.suffixes)}").write_bytes(path.read_bytes())
    last = wrong.strip().splitlines()
    _note(keep, f"{name} {number}: {shlex.join(argv)[:500]}\n  {last[-3:]}")


def _note(keep: Path, words: str) -> None:
    keep.mkdir(exist_ok=True)
    with open(keep / "FOUND.txt", "a") as file:
        print(words, file=file)


if __name__ == "__main__":
    os._exit(main())
