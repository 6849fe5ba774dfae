"""Several ranks of one job: clocks laid over each other, and each collective made one task.

clock    a collective ends on all ranks at once: a rank's clock is off by the median difference
         of the ends of its collectives from those of the first rank
task     a collective holds the communication lanes of all its ranks from the moment the last
         one has arrived; its seconds are those of the rank that waited least
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretell.graph import Kind
from foretell.graph.columns import Array
from foretell.graph.groups import ranks_of
from foretell.trace.step.compose import Part
from foretell.trace.words import Texts

_BEFORE = -1e7  # seconds: before anything that happened
_Key = tuple[int, int]  # group, op


@dataclass(frozen=True, eq=False)
class Match:
    """Collectives found on several ranks: for each, (part, task) pairs; and what did not match."""

    sets: list[list[tuple[int, int]]]
    notes: list[str]


def match(parts: Sequence[Part], texts: Texts) -> Match:
    """The collectives that belong together: the k-th of one op and group on every rank of it."""
    words = list(texts.numbers)
    found: dict[_Key, dict[int, list[int]]] = {}
    for k, p in enumerate(parts):
        for task in _collectives(p):
            key = (int(p.columns["group"][task]), int(p.columns["op"][task]))
            found.setdefault(key, {}).setdefault(k, []).append(task)
    result = Match([], [])
    for (group, op), by_part in found.items():
        wanted = set(ranks_of(words[group])) or {p.draft.rank for p in parts}
        here = {k: v for k, v in by_part.items() if parts[k].draft.rank in wanted}
        counts = {len(v) for v in here.values()}
        present = sum(p.draft.rank in wanted for p in parts)
        if len(counts) != 1 or len(here) != present:
            result.notes.append(
                f"ranks ran different numbers of `{words[op]}` over {words[group] or 'all ranks'}: "
                "each keeps its own"
            )
        elif len(here) > 1:
            pairs = [[(k, task) for task in v] for k, v in sorted(here.items())]
            result.sets.extend(list(row) for row in zip(*pairs, strict=True))
    return result


def _collectives(p: Part) -> list[int]:
    """The collectives of a rank in the order in which they ended."""
    mine = np.flatnonzero((p.columns["kind"] == Kind.COLLECTIVE) & ~p.is_ahead)
    return mine[np.argsort(p.end[mine], kind="stable")].tolist()  # type: ignore[no-any-return]


def shifts(parts: Sequence[Part], found: Match) -> Array:
    """When each rank's step began, on one clock whose zero is the first beginning."""
    begin = np.array([p.draft.events.origin + p.draft.begin for p in parts])
    begin -= begin.min()
    ends: list[list[float]] = [[] for _ in parts]
    for group in found.sets:
        first_part, first = group[0]
        reference = begin[first_part] + parts[first_part].end[first]
        for k, task in group:
            ends[k].append(reference - begin[k] - parts[k].end[task])
    begin += np.array([np.median(e) if e else 0.0 for e in ends])
    found_shifts: Array = begin - begin.min()
    return found_shifts


def late(p: Part, shift: float, texts: Texts) -> Part:
    """A rank whose step began that much later: its main thread, and what its device was doing,
    take that much longer to be free. Nothing changes but what came before the step."""
    if shift <= 0:
        return p
    columns = {k: np.append(v, np.zeros(1, v.dtype)) for k, v in p.columns.items()}
    columns["seconds"][-1], columns["rank"][-1] = shift, p.draft.rank
    columns["op"][-1] = texts.number("late")
    ahead = np.flatnonzero(p.is_ahead)
    _, first = np.unique(columns["lane"][ahead], return_index=True)
    columns["seconds"][ahead[first]] += shift
    return replace(
        p,
        columns=columns,
        issued=np.append(p.issued + shift, _BEFORE),
        start=np.append(p.start + shift, 0.0),
        end=np.append(p.end + shift, shift),
        recorded=np.append(p.recorded, np.zeros((1, 2), np.int32), axis=0),
        is_ahead=np.append(p.is_ahead, True),
    )
