"""`foretell("show x")` in a guide is `foretell show x` in a terminal of 80 columns."""

import os
import shlex
from pathlib import Path

from click.testing import CliRunner

from foretell.cli.main import foretell as program
from foretell.errors import ForetellError

ROOT = Path(__file__).resolve().parents[2]  # paths in guides are those of the repository
PLAIN = {"COLUMNS": "80", "NO_COLOR": "1"}


def foretell(line: str) -> None:
    """Print a command as a person types it, and what it answers."""
    print(f"$ foretell {line}")
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        result = CliRunner(env=PLAIN).invoke(program, shlex.split(line))
    finally:
        os.chdir(before)
    if result.stdout.strip():
        print(result.stdout.strip("\n"))
    if isinstance(result.exception, ForetellError):
        print(f"error: {result.exception}")
    elif result.exception is not None:
        raise result.exception
