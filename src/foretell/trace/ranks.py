"""Several ranks of one job: clocks laid over each other, and each collective made one task.

clock    a collective ends on all ranks at once: a rank's clock is off by the median difference
         of the ends of its collectives, group by group from the first rank outward
task     a collective holds the communication lanes of all its ranks from the moment the last
         one has arrived; its seconds are those of the rank that waited least
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretell.graph import Kind
from foretell.graph.graph import Array, ranks_of
from foretell.trace.step.compose import Part
from foretell.trace.words import Texts

_BEFORE = -1e7  # seconds: before anything that happened
_NOTABLE = 0.03  # of a step: a wait, a delay or a difference worth a word
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
        wanted = set(ranks_of(words[group])) or {p.step.rank for p in parts}
        here = {k: v for k, v in by_part.items() if parts[k].step.rank in wanted}
        counts = {len(v) for v in here.values()}
        present = sum(p.step.rank in wanted for p in parts)
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
    """When each rank's step began, on one clock whose zero is the first beginning.

    Clocks are corrected group by group, outward from the first rank: the groups with the most
    collectives first, so that ranks that share no group with it are reached through others.
    """
    begin = np.array([p.step.events.origin + p.step.begin for p in parts])
    begin -= begin.min()
    begin += _corrections(len(parts), _offsets(parts, found, begin))
    found_shifts: Array = begin - begin.min()
    return found_shifts


def _offsets(
    parts: Sequence[Part], found: Match, begin: Array
) -> list[tuple[tuple[int, ...], Array]]:
    """Groups of parts, most collectives first; by how much each clock is behind their first's."""
    ends: dict[tuple[int, ...], list[list[float]]] = {}
    for group in found.sets:
        ended = [float(begin[k] + parts[k].end[task]) for k, task in group]
        ends.setdefault(tuple(k for k, _ in group), []).append(ended)
    ranked = sorted(ends.items(), key=lambda item: (-len(item[1]), item[0]))
    return [(who, _behind(np.array(rows))) for who, rows in ranked]


def _behind(ended: Array) -> Array:
    """By how much each clock is behind the first: the median over collectives."""
    behind: Array = np.median(ended[:, :1] - ended, axis=0)
    return behind


def _corrections(size: int, groups: list[tuple[tuple[int, ...], Array]]) -> Array:
    """Clock correction of each rank; zero where nothing ties it to the first."""
    known = np.full(size, np.nan)
    for first in range(size):
        if not np.isnan(known[first]):
            continue
        known[first], left = 0.0, groups
        while True:
            tied = [g for g in left if not np.isnan(known[list(g[0])]).all()]
            if not tied:
                break
            for who, behind in tied:
                mine = known[list(who)]
                base = np.nanmedian(mine - behind)
                known[list(who)] = np.where(np.isnan(mine), base + behind, mine)
            left = [g for g in left if not any(g is t for t in tied)]
    return known


def balance(parts: Sequence[Part], found: Match, shift: Array) -> dict[str, Any]:
    """Which ranks hold the others up: seconds of compute, and of waiting in collectives, by rank.

    In a collective every rank waits for the last to arrive; the straggler is the rank that is
    waited for most.
    """
    waited, caused = np.zeros(len(parts)), np.zeros(len(parts))
    for group in found.sets:
        start = np.array([shift[k] + parts[k].start[task] for k, task in group])
        behind = start.max() - start
        for (k, _), wait in zip(group, behind, strict=True):
            waited[k] += wait
        caused[group[int(start.argmax())][0]] += behind.sum() / max(len(group) - 1, 1)
    busy = np.array([_busy(p) for p in parts])
    return {
        "compute_s": busy.tolist(),
        "waiting_s": waited.tolist(),
        "waited_for_s": caused.tolist(),
        "imbalance": float(busy.max() / busy.mean() - 1) if busy.mean() > 0 else 0.0,
    }


def _busy(p: Part) -> float:
    """Seconds of kernels of a rank, collectives left out."""
    own = (p.columns["kind"] == Kind.KERNEL) & ~p.is_ahead
    return float(p.columns["seconds"][own].sum())


def notes_on(
    ranks: Sequence[int], shift: Array, found: dict[str, Any], seconds: float
) -> list[str]:
    """Ranks worth naming, in words: stragglers, late ranks, uneven work."""
    notes = []
    caused = np.array(found["waited_for_s"])
    worst = int(caused.argmax())
    if caused[worst] > _NOTABLE * seconds:
        notes.append(
            f"rank {ranks[worst]} is a straggler: collectives of the others wait for it, "
            f"{1e3 * caused[worst]:.3g} ms a step added up, hidden behind compute or not"
        )
    late_ranks = [(float(s), r) for s, r in zip(shift, ranks, strict=True)]
    if max(late_ranks)[0] > _NOTABLE * seconds:
        by, rank = max(late_ranks)
        notes.append(f"rank {rank} begins its step {1e3 * by:.3g} ms after the first rank does")
    if found["imbalance"] > _NOTABLE:
        busiest = ranks[int(np.argmax(found["compute_s"]))]
        notes.append(
            f"work is uneven: rank {busiest} computes "
            f"{100 * found['imbalance']:.0f} % more than the mean"
        )
    return notes


def late(p: Part, shift: float, texts: Texts) -> Part:
    """A rank whose step began that much later: its main thread, and what its device was doing,
    take that much longer to be free. Nothing changes but what came before the step."""
    if shift <= 0:
        return p
    columns = {k: np.append(v, np.zeros(1, v.dtype)) for k, v in p.columns.items()}
    columns["seconds"][-1], columns["rank"][-1] = shift, p.step.rank
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
