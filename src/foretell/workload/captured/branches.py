"""Units that do not simply follow one another: branches, where they join, and what looks back.

Rows in no numbered module go with the unit before them. Here those that begin anew, from the batch
alone, become a unit of their own (the words of a decoder, the patches beside the words), and those
that bring branches together go with the unit behind. Then each unit knows whom it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foretell.workload.captured.row import Row

Runs = list[tuple[str, list[int]]]
LITTLE = 0.1  # of the largest tensor a unit reads: masks and the like are not worth a message


@dataclass(frozen=True)
class Unit:
    """Rows of one layer, and the units it reads; none where that is the one before."""

    name: str
    rows: tuple[int, ...]
    after: tuple[int, ...] = ()
    is_source: bool = False  # reads the batch alone, and is not the first
    is_numbered: bool = True
    is_read_later: bool = False  # by another than the next


def branched(runs: Runs, rows: Sequence[Row]) -> list[Unit]:
    """The units of runs of rows, with whom they read; a plain chain stays as it is."""
    moved = _joined_later(_begun_anew(runs, rows), rows)
    home = {i: k for k, (_, mine) in enumerate(moved) for i in mine}
    reads = [_reads(mine, home, k, rows) for k, (_, mine) in enumerate(moved)]
    if all(r == {k - 1} or not k for k, r in enumerate(reads)):
        return [Unit(name, tuple(mine), (), False, bool(name)) for name, mine in runs]
    numbered = {name for name, _ in runs}
    late = {j for k, r in enumerate(reads) for j in r if j != k - 1}
    return [
        Unit(
            name,
            tuple(mine),
            () if reads[k] == {k - 1} else tuple(sorted(reads[k])),
            is_source=bool(k) and not reads[k],
            is_numbered=bool(name) and name in numbered,
            is_read_later=k in late,
        )
        for k, (name, mine) in enumerate(moved)
    ]


def _begun_anew(runs: Runs, rows: Sequence[Row]) -> Runs:
    """Runs cut where a module that is in no unit reads nothing of what was made before."""
    out: Runs = []
    for name, mine in runs:
        tail = _tail(name, mine, rows) if name else []
        at = next((k for k, i in enumerate(tail) if _is_new(tail[k:], i, rows)), None)
        if at is None:
            out.append((name, mine))
            continue
        own = rows[tail[at]].path
        out += [(name, mine[: mine.index(tail[at])]), (own, mine[mine.index(tail[at]) :])]
    return out


def _tail(name: str, mine: Sequence[int], rows: Sequence[Row]) -> list[int]:
    """The rows of a run behind its module."""
    inside = [i for i in mine if _is_in(rows[i].path, name)]
    return [i for i in mine if inside and i > inside[-1]]


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _is_new(tail: Sequence[int], first: int, rows: Sequence[Row]) -> bool:
    """Whether what follows is fed by the batch and by nothing that a layer made."""
    row = rows[first]
    if not row.path or not row.live or not row.weights:
        return False
    return not any(rows[j].live and rows[j].weights for j in _upstream([first], rows))


def _upstream(starts: Iterable[int], rows: Sequence[Row]) -> set[int]:
    found: set[int] = set()
    left = [j for i in starts for j in rows[i].after]
    while left:
        j = left.pop()
        if j not in found:
            found.add(j)
            left += rows[j].after
    return found


def _joined_later(runs: Runs, rows: Sequence[Row]) -> Runs:
    """Runs whose last rows bring branches together hand those to the next run."""
    out: Runs = []
    carry: list[int] = []
    for at, (name, given) in enumerate(runs):
        mine = [*carry, *given]
        tail = _tail(name, mine, rows) if name and at + 1 < len(runs) else []
        own = _upstream([i for i in given if i not in tail], rows) | set(given)
        first = next((k for k, i in enumerate(tail) if _brings(i, own, rows)), len(tail))
        carry = tail[first:]
        out.append((name, [i for i in mine if i not in carry]))
    return out


def _brings(at: int, own: set[int], rows: Sequence[Row]) -> bool:
    """Whether a row reads what did not lead up to its unit."""
    return any(rows[j].live and j not in own for j in rows[at].after)


def _reads(mine: Sequence[int], home: dict[int, int], k: int, rows: Sequence[Row]) -> set[int]:
    """The units whose results one reads; masks and the like are made anew from the batch."""
    sizes: dict[int, float] = {}
    for i in mine:
        for j in rows[i].after:
            if rows[j].learned and home.get(j, k) != k:
                sizes[home[j]] = max(sizes.get(home[j], 0.0), rows[j].size)
    most = max(sizes.values(), default=0.0)
    return {unit for unit, size in sizes.items() if size >= LITTLE * most}
