"""A TOML text, its values, and what is wrong with it, line by line.

Readers note every problem and go on, so that one look at a file tells all of them.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretell.errors import InputError, unknown
from foretell.io import parse_toml

Place = tuple[str | int, ...]  # ("node", 2, "nic"): the key `nic` of the third [[node]]

_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=(.*)")
_TOLD = 100  # problems of a file that are listed at once
_AT_LINE = re.compile(r"\(at line (\d+), column \d+\)|\(at end of document\)")


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a file: what, where, and what would help."""

    message: str
    line: int = 0  # counted from 1; 0 where it is not known
    hint: str = ""
    file: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.message}" if where else self.message


@dataclass
class Page:
    """A TOML text being read: its values, the line of each key, and the problems found so far."""

    file: str
    values: dict[str, Any]
    lines: Mapping[Place, int]
    noted: dict[Problem, None] = field(default_factory=dict)

    @property
    def problems(self) -> list[Problem]:
        """What was found, in the order it was."""
        return list(self.noted)

    def note(self, place: Place, message: str, hint: str = "") -> None:
        """Remember a problem with the value at a place, once."""
        self.noted.setdefault(Problem(message, self.line(place), hint, self.file))

    def note_unknown(self, place: Place, what: str, name: str, known: Any) -> None:
        """Remember an unknown name, with the nearest known one."""
        error = unknown(what, name, known)
        self.note(place, error.message, error.hint)

    def line(self, place: Place) -> int:
        """The line of a key, or of the nearest table around it."""
        while place and place not in self.lines:
            if (*place, 0) in self.lines:  # the first of [[place]]
                return self.lines[*place, 0]
            place = place[:-1]
        return self.lines.get(place, 0)


def parse(text: str, file: str = "") -> Page:
    """Read a TOML text; a text that is not TOML becomes a page with that one problem."""
    if not text.strip():
        hint = "a cluster file needs at least one [[node]] table; see docs/reference/clusters.md"
        return Page(file, {}, {}, {Problem("the file is empty", 0, hint, file): None})
    try:
        return Page(file, parse_toml(text, file or "the cluster", finite=False), _lines(text))
    except InputError as error:
        return Page(file, {}, {}, {Problem(error.message, 0, error.hint, file): None})
    except tomllib.TOMLDecodeError as error:
        return Page(file, {}, {}, {_not_toml(text, str(error), file): None})


def _not_toml(text: str, error: str, file: str) -> Problem:
    found = _AT_LINE.search(error)
    last = len(text.splitlines())
    line = int(found[1]) if found and found[1] else last
    what = _AT_LINE.sub("", error).strip()
    cut = line >= last
    hint = "is the file cut off here?" if cut else "the file must be TOML: `key = value` lines"
    return Problem(f"not TOML: {what[:1].lower()}{what[1:]}", line, hint, file)


def fail(problems: list[Problem], file: str) -> InputError:
    """One error that tells every problem of a file."""
    first = problems[0]
    if len(problems) == 1:
        return InputError(str(first), hint=first.hint)
    told = in_order(problems)[:_TOLD]
    rows = "\n".join(f"  {p}" + (f" ({p.hint})" if p.hint else "") for p in told)
    rows += f"\n  and {len(problems) - _TOLD} more" * (len(problems) > _TOLD)
    return InputError(f"{len(problems)} problems in {file or 'the cluster'}:\n{rows}")


def in_order(problems: list[Problem]) -> list[Problem]:
    """By line; those without one last."""
    return sorted(problems, key=lambda p: (not p.line, p.line))


def _lines(text: str) -> dict[Place, int]:
    """The line of every table and key; what stands inside a value of several lines is skipped."""
    found: dict[Place, int] = {}
    here: Place = ()
    tables: dict[Place, int] = {}
    quoted, depth = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        outside = not quoted and not depth
        header, key = (_HEADER.match(line), _KEY.match(line)) if outside else (None, None)
        if header:
            here = _table(_dotted(header[2]), header[1] == "[[", tables)
            found.setdefault(here, number)
            continue
        if key:
            found.setdefault(here + _dotted(key[1]), number)
        quoted = _still_quoted(line, quoted)
        depth = max(0, depth + _opened(key[2] if key else line)) if not quoted else depth
    return found


def _still_quoted(line: str, quoted: str) -> str:
    """The triple quote a text is in after this line, if any."""
    for mark in re.findall(r'"""|\'\'\'', line):
        quoted = "" if quoted == mark else quoted or mark
    return quoted


def _opened(line: str) -> int:
    """How many more brackets a line opens than it closes, strings and comments apart."""
    bare = re.sub(r"""\"[^\"]*\"|'[^']*'|#.*""", "", line)
    return sum(bare.count(c) for c in "[{") - sum(bare.count(c) for c in "]}")


def _table(path: Place, many: bool, tables: dict[Place, int]) -> Place:
    """The place of a table header; each [[name]] opens the next of its kind."""
    place: Place = ()
    for i, part in enumerate(path):
        place += (part,)
        if many and i == len(path) - 1:
            tables[place] = tables.get(place, -1) + 1
        if place in tables:
            place += (tables[place],)
    return place


def _dotted(text: str) -> Place:
    parts = re.findall(r"\"([^\"]*)\"|'([^']*)'|([^.\s\"']+)", text)
    return tuple(a or b or c for a, b, c in parts)
