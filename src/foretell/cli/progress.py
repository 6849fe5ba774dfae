"""A sign of life on anything that takes longer than a moment: on stderr, and only for a person.

Where it is known how many pieces there are, or about how long it takes, a bar tells the time left;
elsewhere a clock runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretell.cli.output import is_quiet

Tell = Callable[[str], None]
READ = 1.6e7  # bytes of a trace a second: 32 MB, 108,000 events, in 2.0 CPU-s


@contextmanager
def working(what: str, *, steps: int = 0, about: float = 0.0) -> Iterator[Tell]:
    """Show that work goes on, how much is left of it, and what `tell` last said.

    `steps`: how often `tell` will be called, or nearly. `about`: how many seconds it takes, or at
    most takes.
    """
    if is_quiet() or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(*_columns(steps, about), console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=steps or about or None, left="")
        if about:
            _run_down(shown, task, about)

        def tell(words: str) -> None:
            shown.update(task, description=f"{what}: {words}")
            if steps:
                _advance(shown, task)

        yield tell


@contextmanager
def reading(path: Path) -> Iterator[Tell]:
    """Show that a trace is being read, and about how long that takes."""
    with working(f"reading {path.name}", about=_unpacked(path) / READ) as tell:
        yield tell


def _unpacked(path: Path) -> int:
    """Bytes of a file or of a folder's files, as they are once unpacked, or nearly."""
    if path.is_dir():
        return sum(_unpacked(inside) for inside in path.iterdir() if inside.is_file())
    if not path.is_file() or path.suffix != ".gz":
        return path.stat().st_size if path.is_file() else 0
    with open(path, "rb") as file:
        file.seek(-4, 2)
        return int.from_bytes(file.read(4), "little")  # gzip's own count, modulo 4 GiB


def _columns(steps: int, about: float) -> tuple[Any, ...]:
    from rich.progress import (
        BarColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    first = (SpinnerColumn(), TextColumn("{task.description}"))
    if steps:
        return *first, BarColumn(20), TimeRemainingColumn(), TextColumn("left")
    if about:
        return *first, BarColumn(20), TextColumn("{task.fields[left]}")
    return *first, TimeElapsedColumn()


def _advance(shown: Any, task: Any) -> None:
    """One piece more is begun; where there are more than was said, there is one more."""
    begun = shown.tasks[task].completed + 1
    shown.update(task, completed=begun, total=max(begun + 1, shown.tasks[task].total or 0))


def _run_down(shown: Any, task: Any, about: float) -> None:
    """Let the bar follow the clock whenever it is drawn."""
    began, drawn = time.monotonic(), shown.get_renderables

    def renderables() -> Any:
        spent = time.monotonic() - began
        left = f"about {about - spent:.0f} s left" if spent < about else f"{spent:.0f} s"
        shown.tasks[task].completed = min(spent, about)
        shown.tasks[task].fields["left"] = left
        return drawn()

    shown.get_renderables = renderables
