"""Memory over time: what each rank holds while a timeline passes, its peak, and who holds it.

Memory is taken when the task that makes a buffer starts and given back when the last that uses it
ends. At one instant what is given back counts before what is taken, as an allocator would reuse it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foretell.graph.graph import NONE, Array, BufferKind, word_of
from foretell.simulate.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes held on one rank: `held[k]` from `time[k]` on."""

    rank: int
    time: Array
    held: Array
    peak: float
    at: float  # when the peak is first reached
    holders: Array  # buffers there at the peak, largest first


def memory(timeline: Timeline) -> list[Memory]:
    """The memory of every rank that has buffers."""
    ranks = np.unique(timeline.graph.buffers.rank).tolist()
    return [_memory(timeline, rank) for rank in ranks]


def peak_bytes(timeline: Timeline) -> float:
    """The largest peak of any rank; zero where nothing is known of buffers."""
    return max((m.peak for m in memory(timeline)), default=0.0)


def held_by_kind(timeline: Timeline, at: Memory) -> dict[str, float]:
    """Bytes at the peak by what they are for, largest first."""
    b = timeline.graph.buffers
    kinds = b.kind[at.holders]
    sums = {
        word_of(BufferKind, k): float(b.bytes[at.holders][kinds == k].sum()) for k in set(kinds)
    }
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def _memory(timeline: Timeline, rank: int) -> Memory:
    b = timeline.graph.buffers
    mine = np.flatnonzero(b.rank == rank)
    born, dies = _life(timeline, mine)
    lives = dies > born
    mine, born, dies = mine[lives], born[lives], dies[lives]
    time, held = held_of(timeline, mine)
    top = int(np.argmax(held)) if len(held) else NONE
    at = float(time[top]) if top != NONE else 0.0
    there = mine[(born <= at) & (dies > at)]
    largest = there[np.argsort(-b.bytes[there], kind="stable")]
    return Memory(rank, time, held, float(held[top]) if top != NONE else 0.0, at, largest)


def held_of(timeline: Timeline, buffers: Array) -> tuple[Array, Array]:
    """Instants at which some buffers come or go, and the bytes of them held from each one on."""
    born, dies = _life(timeline, buffers)
    size = timeline.graph.buffers.bytes[buffers]
    ends = np.isfinite(dies)
    time = np.concatenate([dies[ends], born])
    order = np.argsort(time, kind="stable")  # given back first: those stand first
    return time[order], np.cumsum(np.concatenate([-size[ends], size])[order])


def _life(timeline: Timeline, buffers: Array) -> tuple[Array, Array]:
    """From when to when each buffer is there."""
    b = timeline.graph.buffers
    maker, user = b.born[buffers], b.dies[buffers]
    born = np.where(maker == NONE, 0.0, timeline.start[maker] if len(timeline) else 0.0)
    dies = np.where(user == NONE, np.inf, timeline.end[user] if len(timeline) else 0.0)
    return born, np.maximum(born, dies)
