"""Runs the command line in this process and says what must not happen: one rule for every fuzzer.

A command ends with 0, 2 or 3; a mistake of the input is one message without a traceback; JSON is
strict; no control byte of a file reaches the terminal; nothing runs for long.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretell.cli.main import main

SECONDS = 30.0  # of one command; sound ones take a hundredth of that
_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")


class Hang(BaseException):
    """A command that did not end in time."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it printed."""

    code: int
    out: bytes
    err: bytes
    crash: str = ""


def run(argv: Sequence[str], folder: Path, seconds: float = SECONDS) -> Outcome:
    """Run one command in a folder."""
    out, err = io.BytesIO(), io.BytesIO()
    code, crash = 0, ""
    with _redirected(out, err), contextlib.chdir(folder):
        try:
            with _alarm(seconds):
                main(list(argv))
        except SystemExit as done:
            code = done.code if isinstance(done.code, int) else 1
        except Hang:
            crash = f"still running after {seconds:g} s"
        except BaseException:
            crash = traceback.format_exc()
    return Outcome(code, out.getvalue(), err.getvalue(), crash)


def problem(argv: Sequence[str], found: Outcome) -> str:
    """What is wrong with how a command ended; nothing where it is as it must be."""
    if found.crash:
        return found.crash
    if found.code not in (0, 2, 3):
        return f"ended with {found.code}: {found.err[-300:]!r}"
    if found.code == 2 and not any(x.startswith(b"error: ") for x in found.err.splitlines()):
        return f"ended with 2 and no message: {found.err[:200]!r}"
    for name, text in (("stdout", found.out), ("stderr", found.err)):
        if raw := _CONTROL.search(text):
            return f"control byte {raw[0]!r} on {name}: {text[:200]!r}"
    return _strict(found.out) if "--json" in argv and found.code != 2 else ""


def _strict(out: bytes) -> str:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} in JSON")

    try:
        for line in out.decode().splitlines():
            json.loads(line, parse_constant=refuse)
    except ValueError as error:
        return f"stdout is not strict JSON: {error}"
    return ""


@contextlib.contextmanager
def _redirected(out: io.BytesIO, err: io.BytesIO) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(kept, encoding="utf-8", errors="strict", write_through=True)
        for kept in (out, err)
    )
    try:
        yield
    finally:
        for made in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError):
                made.flush()
                made.detach()
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, stop)  # CPU time: a busy machine is no hang
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def quietly() -> None:
    """No colours, whatever the terminal is."""
    os.environ["NO_COLOR"] = "1"
