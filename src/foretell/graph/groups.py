"""Sets of ranks as short text: `0-7` a run, `0-56/8` every eighth, `0+3+5` one by one.

Parts are joined by `+`, so that any set can be written: `0-3+8-11`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from foretell.errors import InputError

_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([0-9]{1,9}))?)?")
_MOST = 1 << 20  # ranks in a group; more than any machine has, and still a list that fits


def ranks_of(text: str) -> tuple[int, ...]:
    """The ranks that a text names, in its order; none where it is empty."""
    ranks: list[int] = []
    for part in text.split("+") if text else ():
        found = _span(part)
        if not found or len(ranks) + len(found) > _MOST:
            raise InputError(
                f"`{part}` in the group `{text}` names {'too many' if found else 'no'} ranks",
                hint="write 0-7, 0-56/8 or 0+3+5",
            )
        ranks += found
    return tuple(ranks)


def _span(part: str) -> range:
    """The ranks of one part, none where it cannot be read."""
    found = _PART.fullmatch(part)
    if not found or (found[3] and int(found[3]) == 0):
        return range(0)
    first, last = int(found[1]), int(found[2] or found[1])
    return range(first, last + 1, int(found[3] or 1))


def group_text(ranks: Iterable[int]) -> str:
    """A short text that names those ranks in that order: equally spaced runs as one part."""
    left, parts = list(ranks), []
    while left:
        run = _run(left)
        parts.append(_part(left[:run]))
        left = left[run:]
    return "+".join(parts)


def _run(ranks: list[int]) -> int:
    """How many ranks from the first on are equally spaced."""
    if len(ranks) < 2 or ranks[1] <= ranks[0]:
        return 1
    step, count = ranks[1] - ranks[0], 2
    while count < len(ranks) and ranks[count] - ranks[count - 1] == step:
        count += 1
    return count if step == 1 or count > 2 else 1


def _part(run: list[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    step = run[1] - run[0]
    return f"{run[0]}-{run[-1]}" + (f"/{step}" if step > 1 else "")
