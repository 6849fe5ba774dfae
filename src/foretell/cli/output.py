"""What every command shares: `--json`, `--quiet`, and where answers and words go."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foretell.errors import InputError
from foretell.io import coloured, shown

if TYPE_CHECKING:
    from foretell.api import Result

Command = Callable[..., Any]
_QUIET = "foretell.quiet"


def json_option(command: Command) -> Command:
    """`--json`: the answer as one JSON object, times in seconds, sizes in bytes."""
    text = "Answer as JSON: times in seconds, sizes in bytes."
    return click.option("--json", "as_json", is_flag=True, help=text)(command)


def output_option(command: Command) -> Command:
    """`-o`: where to write timelines, as a page or a trace."""
    text = "Write a page (.html) or a trace for viewers (.json, .json.gz)."
    kind = click.Path(path_type=Path)
    return click.option("-o", "--output", type=kind, help=text)(command)


def write_output(timelines: list[tuple[str, Any]], output: Path | None) -> None:
    """Write timelines where the person asked for them, and say so."""
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
    """Words for the person, not part of the answer; none with `--quiet`."""
    if not is_quiet():
        click.echo(shown(words), err=True)


def quiet_option() -> click.Option:
    """`-q`: nothing but answers and errors; every command has it."""

    def note(context: click.Context, _: click.Parameter, value: bool) -> None:
        context.meta[_QUIET] = value or context.meta.get(_QUIET, False)

    text = "Say nothing but the answer: no progress, no notes on what was written."
    return click.Option(
        ["-q", "--quiet"], is_flag=True, expose_value=False, callback=note, help=text
    )


def is_quiet() -> bool:
    """Whether the person asked for silence."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(_QUIET))


def is_for_programs() -> bool:
    """Whether the person asked for JSON."""
    context = click.get_current_context(silent=True)
    return bool(context and context.params.get("as_json"))
