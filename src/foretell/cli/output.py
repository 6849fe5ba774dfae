"""What every command shares: the `--json` switch, and where answers and words go."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]


def json_option(command: Command) -> Command:
    """`--json`: the answer as one JSON object, times in seconds, sizes in bytes."""
    text = "Answer as JSON: times in seconds, sizes in bytes."
    return click.option("--json", "as_json", is_flag=True, help=text)(command)


def answer(value: Any, as_json: bool, text: Callable[[Any], str]) -> None:
    """Print an answer to stdout: as JSON, or as `text` puts it."""
    click.echo(json.dumps(value, default=_plain) if as_json else text(value))


def say(words: str) -> None:
    """Words for the person, not part of the answer."""
    click.echo(words, err=True)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
