"""Where JSON values begin and end in a piece of text, without parsing them.

Only bytes that can change anything (quotes and brackets) are looked at, all at once. There is no
compiled loop: loading one costs more time and memory than reading most traces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph.columns import Array

_QUOTE, _BACKSLASH = 34, 92
_OPEN, _CLOSE = (123, 91), (125, 93)  # { [ and } ]


@dataclass
class Inside:
    """How deep in brackets, and whether in a string, the text so far has ended."""

    depth: int = 0
    quoted: bool = False


@dataclass(frozen=True, eq=False)
class Brackets:
    """The brackets of a text that are not in strings, and the depth behind each."""

    at: Array  # place in the text
    step: Array  # 1 opens, -1 closes
    depth: Array


def brackets(text: bytes, seen: int, inside: Inside) -> Brackets:
    """The brackets behind the first `seen` bytes; `inside` is carried on to the end of the text."""
    whole = np.frombuffer(text, np.uint8)
    code = whole[seen:]
    wanted = code == _QUOTE
    for bracket in (*_OPEN, *_CLOSE):
        wanted |= code == bracket
    at = np.flatnonzero(wanted)
    code = code[at]
    is_quote = (code == _QUOTE) & ~_are_escaped(whole, seen + at, code)
    quoted = (np.cumsum(is_quote) + inside.quoted) % 2 == 1
    is_bracket = (code != _QUOTE) & ~quoted
    at, code = seen + at[is_bracket], code[is_bracket]
    step = np.where(np.isin(code, _OPEN), 1, -1)
    depth = inside.depth + np.cumsum(step)
    inside.depth = int(depth[-1]) if len(depth) else inside.depth
    inside.quoted = bool(quoted[-1]) if len(quoted) else inside.quoted
    return Brackets(at, step, depth)


def _are_escaped(whole: Array, at: Array, code: Array) -> Array:
    """Which of these bytes are quotes behind an odd number of backslashes."""
    before = whole[np.maximum(at - 1, 0)]
    found: Array = (code == _QUOTE) & (before == _BACKSLASH) & (at > 0)
    for k in np.flatnonzero(found).tolist():
        first = int(at[k]) - 1
        while first >= 0 and whole[first] == _BACKSLASH:
            first -= 1
        found[k] = (int(at[k]) - 1 - first) % 2 == 1
    return found


def last_value(b: Brackets) -> tuple[int, int]:
    """(end of the last whole value, place of the bracket that closes the list around it or -1)."""
    beyond = np.flatnonzero(b.depth < 0)
    close = int(b.at[beyond[0]]) if len(beyond) else -1
    whole = np.flatnonzero((b.depth == 0) & (b.step < 0))
    if len(beyond):
        whole = whole[whole < beyond[0]]
    return int(b.at[whole[-1]]) + 1 if len(whole) else 0, close


def values(text: bytes) -> list[tuple[int, int]]:
    """Where each value in brackets begins and ends in a list without its own brackets."""
    b = brackets(text, 0, Inside())
    begin = b.at[(b.depth == 1) & (b.step > 0)]
    end = b.at[(b.depth == 0) & (b.step < 0)] + 1
    return list(zip(begin.tolist(), end.tolist(), strict=False))
