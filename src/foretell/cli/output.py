"""Shared by all commands: `--json`, `--quiet`, `--jobs`, clusters, output and progress.

Progress is shown on stderr and only to a person, on anything that takes longer than a moment: a bar
with the time left where it is known how much is done or about how long it takes, else a clock.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from foretell.errors import InputError
from foretell.io import coloured, shown

if TYPE_CHECKING:
    from foretell.api import Result


Command = Callable[..., Any]
_QUIET = "foretell.quiet"
READ = 1.6e7  # bytes of a trace a second: 32 MB, 108,000 events, in 2.0 CPU-s
LEAST = 0.01  # of the work: before so much is done, its pace says nothing


class _File(click.Path):
    """A path that is not empty: Python takes an empty one for the current folder."""

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the name of a file is empty", param, ctx)
        return super().convert(value, param, ctx)


FILE = _File(path_type=Path)


@contextmanager
def terminated_as_stopped() -> Iterator[None]:
    """SIGTERM, which schedulers send, raises KeyboardInterrupt inside."""
    if threading.current_thread() is not threading.main_thread():  # only there may it be caught
        yield
        return
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def json_option(command: Command) -> Command:
    """`--json`: the answer as one JSON object, times in seconds, sizes in bytes."""
    text = "Answer as JSON: times in seconds, sizes in bytes."
    return click.option("--json", "as_json", is_flag=True, help=text)(command)


def output_option(command: Command) -> Command:
    """`-o`: where to write timelines, as a page or a trace."""
    text = "Write a page (.html) or a trace for viewers (.json, .json.gz)."
    return click.option("-o", "--output", type=FILE, help=text)(command)


def write_output(timelines: list[tuple[str, Any]], output: Path | None) -> None:
    """Write timelines to the file of `-o`, and report its name."""
    if output is None:
        return
    from foretell.report import write

    write(timelines, output)
    say(f"written: {output}")


def require_place(output: Path) -> None:
    """Raise where a file cannot be put, before anything is worked out for it."""
    if output.is_dir() or not output.parent.is_dir():
        why = "it is a folder" if output.is_dir() else f"there is no folder `{output.parent}`"
        raise InputError(f"cannot write `{output}`: {why}", hint="name a file in a folder there is")


def verbose_option(command: Command) -> Command:
    """`-v`: all that is known, below the verdict."""
    text = "Show all details: assumptions, alternatives, limits."
    return click.option("-v", "--verbose", is_flag=True, help=text)(command)


def answer(value: Any, as_json: bool, text: Callable[[Any], str]) -> None:
    """Print an answer to stdout: as JSON, or as `text` puts it."""
    click.echo(as_text(value) if as_json else coloured(text(value)))


def as_text(value: Any) -> str:
    """A value as one line of strict JSON: what is not finite is null."""
    from foretell.api.result import json_text

    return json_text(value)


def answer_result(found: Result, as_json: bool, verbose: bool = False) -> None:
    """Print a result of the Python API: as JSON, or its verdict and tables."""
    click.echo(found.to_json() if as_json else emphasised(coloured(found.text(verbose))))


def emphasised(text: str) -> str:
    """The verdict in bold where the terminal takes colours."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    head, newline, rest = text.partition("\n")
    while rest.startswith("  "):  # the sentence goes on
        line, newline, rest = rest.partition("\n")
        head = f"{head}\n{line}"
    return f"\x1b[1m{head}\x1b[0m{newline}{rest}"


def say(words: str) -> None:
    """A message on stderr, not part of the answer; none with `--quiet`."""
    from foretell.report.words import fitted

    if not is_quiet():
        is_to_copy = words.startswith(("written: ", "$ "))  # a path or a command stays one line
        click.echo(shown(words) if is_to_copy else fitted(shown(words)), err=True)


def quiet_option() -> click.Option:
    """`-q`: nothing but answers and errors; every command has it."""

    def note(context: click.Context, _: click.Parameter, value: bool) -> None:
        context.meta[_QUIET] = value or context.meta.get(_QUIET, False)

    text = "Print only the answer: no progress, no notes."
    return click.Option(
        ["-q", "--quiet"], is_flag=True, expose_value=False, callback=note, help=text
    )


def is_quiet() -> bool:
    """Whether `--quiet` is set."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(_QUIET))


def is_for_programs() -> bool:
    """Whether `--json` is set."""
    context = click.get_current_context(silent=True)
    return bool(context and context.params.get("as_json"))


class OnProgress(Protocol):
    """Report what is being done and, where known, the share done."""

    def __call__(self, words: str, share: float | None = None) -> None: ...


@dataclass
class _ProgressState:
    """Progress of some work, from its expected size and its own reports."""

    steps: int = 0
    about: float = 0.0
    share: float = 0.0
    is_reported: bool = False  # whether the work itself reports its share
    begun: int = 0
    began: float = field(default_factory=time.monotonic)
    since: tuple[float, float] = (0.0, 0.0)  # time and share of the first report

    def advance(self, share: float | None) -> None:
        """One piece more is begun, or so much is done."""
        first = self.share if share is None else share
        if not self.since[0] and (share is not None or self.steps):
            self.since = time.monotonic(), first
        if share is not None:
            self.share, self.is_reported = min(max(share, 0.0), 1.0), True
        elif self.steps:  # more steps than expected: one more
            self.begun += 1
            self.steps = max(self.steps, self.begun)
            self.share = (self.begun - 1) / self.steps

    def bar(self) -> tuple[float | None, str]:
        """The share that is done, None where it is unknown, and the time left or spent."""
        spent = time.monotonic() - self.began
        if self.about and not self.is_reported:
            is_over = spent > self.about
            text = _time(spent) if is_over else f"about {_time(self.about - spent)} left"
            return min(spent / self.about, 1.0), text
        if not self.steps and not self.is_reported:
            return None, _time(spent)
        began, first = self.since
        if self.share - first < LEAST:
            return self.share, _time(spent)
        left = (time.monotonic() - began) * (1 - self.share) / (self.share - first)
        return self.share, f"about {_time(left)} left"


@contextmanager
def working(what: str, *, steps: int = 0, about: float = 0.0) -> Iterator[OnProgress]:
    """Show a progress bar with the time left and the last message of `tell`.

    `steps`: how often `tell` will be called, or nearly. `about`: how many seconds it takes, or at
    most takes. A share reported by the work itself overrides both.
    """
    if is_quiet() or is_for_programs() or not sys.stderr.isatty():
        yield lambda words, share=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
    from rich.table import Column

    work = _ProgressState(steps, about)
    words = TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1))
    left = TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True))
    columns = (SpinnerColumn(), words, BarColumn(20), left)
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as shown:
        task = shown.add_task(what, total=None, left="")
        _redraw(shown, task, work)

        def tell(words: str, share: float | None = None) -> None:
            shown.update(task, description=f"{what}: {words}")
            work.advance(share)

        yield tell


def _time(seconds: float) -> str:
    """Remaining time, rounded."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _redraw(shown: Any, task: Any, work: _ProgressState) -> None:
    """Let the bar follow the work, and the clock, whenever it is drawn."""
    drawn = shown.get_renderables

    def renderables() -> Any:
        done, left = work.bar()
        row = shown.tasks[task]
        row.total, row.completed = (None, 0.0) if done is None else (1.0, done)
        row.fields["left"] = left
        return drawn()

    shown.get_renderables = renderables


@contextmanager
def reading(path: Path) -> Iterator[OnProgress]:
    """Show that a trace is being read, and about how long that takes."""
    with working(f"reading {path.name}", about=_unpacked(path) / READ) as tell:
        yield tell


def _unpacked(path: Path) -> int:
    """Decompressed bytes of a file or of a folder's files, nearly."""
    if path.is_dir():
        return sum(_unpacked(inside) for inside in path.iterdir() if inside.is_file())
    if not path.is_file() or path.suffix != ".gz":
        return path.stat().st_size if path.is_file() else 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4))
        return int.from_bytes(file.read(4), "little")  # gzip's own count, modulo 4 GiB


def real_option(command: Command) -> Command:
    """`--real-ms`, in seconds."""
    text = "Measured step without the profiler, in ms (of a trace)."
    option = click.option("--real-ms", "real", type=float, callback=_in_seconds, help=text)
    return option(command)


def _in_seconds(_: click.Context, __: click.Parameter, milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def calibration_option(command: Command) -> Command:
    """`--calibration FILE`."""
    return click.option("--calibration", type=FILE, help="A file of `foretell fit`.")(command)


def pool_options(command: Command) -> Command:
    """Let a command share its work out."""
    jobs = click.option(
        "--jobs", type=click.IntRange(min=1), default=1, show_default=True,
        help="Processes to use on this machine.",
    )  # fmt: skip
    return jobs(ray_option(command))


def ray_option(command: Command) -> Command:
    """`--on-ray`: a Ray cluster to work on."""
    text = "A Ray cluster: its address, `auto`, or `local` to start one here."
    return click.option("--on-ray", default="", metavar="ADDRESS", help=text)(command)
