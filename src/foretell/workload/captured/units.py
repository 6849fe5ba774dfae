"""Where a recorded step is cut into layers: by modules or by what repeats; branches and their
joins.

A unit is what runs inside one numbered module (`h.3`, `layer1.0`, `features.5`); one that is made
of numbered modules which themselves hold several matmuls is taken apart (`layers.0.blocks.1`).
Where nothing is numbered (a trace, or a model written in one piece), the longest stretch of calls
that repeats with equal shapes is what is cut (→ `repeats`).

Units that do not simply follow one another: branches, where they join, and what looks back. Rows in
no numbered module go with the unit before them. Here those that begin anew, from the batch alone,
become a unit of their own (the words of a decoder, the patches beside the words), and those that
bring branches together go with the unit behind. Then each unit knows whom it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.workload.captured.roles import is_linear, is_through
from foretell.workload.captured.rows import Row

Runs = list[tuple[str, list[int]]]
LITTLE = 0.1  # of the largest tensor a unit reads: masks and the like are not worth a message


SOME = 0.4  # of all matmuls that what repeats must hold
SHARE = 0.9  # of a module's matmuls that its numbered parts must hold before it is taken apart


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


def units_of(rows: Sequence[Row]) -> list[tuple[str, list[int]]]:
    """Names and rows of the layers in order; what is not numbered has an empty name."""
    names = _names(rows)
    if not any(names):
        names = repeats(rows)
    if not any(names):
        names = _narrows(rows)
    runs: list[tuple[str, list[int]]] = []
    for at, name in enumerate(names):
        if not runs or (name and name != runs[-1][0]):
            runs.append((name, [at]))
        else:
            runs[-1][1].append(at)
    return _joined(_with_ends(runs, names), rows)


def is_heavy(row: Row) -> bool:
    """Whether it has weights that are multiplied with."""
    return row.op == "convolution" or is_linear(row) or "_rnn" in row.op


def _names(rows: Sequence[Row]) -> list[str]:
    """For each row the numbered module it is in."""
    paths = [row.path.split(".") for row in rows]
    depth = [_numbered(parts, 0) for parts in paths]
    names = [".".join(p[:d]) for p, d in zip(paths, depth, strict=True)]
    for name in dict.fromkeys(filter(None, names)):
        mine = [i for i, n in enumerate(names) if n == name]
        inner = {i: ".".join(paths[i][: _numbered(paths[i], depth[i])]) for i in mine}
        if _is_made_of(mine, inner, rows):
            for i in mine:
                names[i] = inner[i] or name
    return names


def _numbered(parts: Sequence[str], start: int) -> int:
    """Where the next numbered module ends; 0 where there is none."""
    return next((i + 1 for i in range(start, len(parts)) if parts[i].isdigit()), 0)


def _is_made_of(mine: list[int], inner: dict[int, str], rows: Sequence[Row]) -> bool:
    """Whether a module is a row of numbered ones with several matmuls each."""
    heavy = [i for i in mine if is_heavy(rows[i])]
    held = Counter(inner[i] for i in heavy if inner[i])
    several = [n for n in held.values() if n > 1]
    return len(several) > 1 and sum(several) >= SHARE * len(heavy)


def repeats(rows: Sequence[Row]) -> list[str]:
    """Rows named by which copy they are in of the longest stretch that repeats."""
    codes: dict[tuple[object, ...], int] = {}
    signs = np.array(
        [codes.setdefault((r.op, r.call.dims, r.call.lists), len(codes)) for r in rows]
    )
    heavy = np.array([is_heavy(r) for r in rows])
    best = (0, 0, 0)  # rows covered, less the period; period; start
    for period in range(1, len(rows) // 2 + 1):
        same = signs[:-period] == signs[period:]
        start, length = _longest(same)
        copies = length // period + 1
        if copies > 1 and heavy[start : start + period].sum() > 1 and length > best[0]:
            best = (length, period, start)
    length, period, start = best
    names = [""] * len(rows)
    if not period or heavy[start : start + length + period].sum() < SOME * heavy.sum():
        return names
    start = _cleanest(rows, start, period, length)
    for copy in range((length + period) // period):
        low = start + copy * period
        if low + period <= len(rows):
            names[low : low + period] = [f"block.{copy}"] * period
    return names


def _narrows(rows: Sequence[Row]) -> list[str]:
    """Rows named by where a single tensor goes from one to the next, a matmul in each part."""
    thin, names, part, full = crossings(rows) == 1, [], 0, False
    for at, row in enumerate(rows):
        if full and thin[at] and not is_through(row):
            part, full = part + 1, False
        full = full or is_heavy(row)
        names.append(f"part.{part}")
    return names


def _longest(same: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """Start and length of the longest run of true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    at = int(np.argmax(lengths))
    return int(edges[::2][at]), int(lengths[at])


def _cleanest(rows: Sequence[Row], start: int, period: int, length: int) -> int:
    """The place in a period where the fewest tensors cross from one copy to the next.

    Later places lose a copy where the stretch has no rows left for it, and are not looked at.
    """
    many = crossings(rows)
    options = range(start, start + length % period + 1)
    return min(options, key=lambda at: (many[at], at))


def crossings(rows: Sequence[Row]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How many tensors that depend on the batch are made before each row and used from there on."""
    last: dict[int, int] = {}
    for at, row in enumerate(rows):
        last |= dict.fromkeys(row.after, at)
    change = np.zeros(len(rows) + 2, np.int64)
    for made, used in last.items():
        if rows[made].learned:
            change[made + 1] += 1
            change[used + 1] -= 1
    return np.cumsum(change)


def crossing(rows: Sequence[Row], at: int) -> list[int]:
    """Those tensors at one place, by the rows that make them."""
    used = {i for row in rows[at:] for i in row.after}
    return [i for i in sorted(used) if i < at and rows[i].learned]


def _with_ends(
    runs: list[tuple[str, list[int]]], names: Sequence[str]
) -> list[tuple[str, list[int]]]:
    """Rows after the last numbered one form a unit of their own."""
    if not runs or not runs[-1][0]:
        return runs
    last = max(i for i, name in enumerate(names) if name)
    name, mine = runs[-1]
    tail = [i for i in mine if i > last]
    runs[-1] = (name, [i for i in mine if i <= last])
    return [*runs, ("", tail)] if tail else runs


def _joined(runs: list[tuple[str, list[int]]], rows: Sequence[Row]) -> list[tuple[str, list[int]]]:
    """Units without any product are part of the one before (a pool behind a convolution)."""
    out: list[tuple[str, list[int]]] = []
    for name, mine in runs:
        if out and out[-1][0] and name and not any(is_heavy(rows[i]) for i in mine):
            out[-1][1].extend(mine)
        else:
            out.append((name, list(mine)))
    return out
