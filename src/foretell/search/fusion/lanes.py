"""The timeline of a fused step, compiled, and DDP's buckets on it.

The two lanes of a data-parallel step, compiled: what a search asks tens of thousands of times.

    compute   groups one after another: each in its turn by its last op, as early as what it reads
    wire      messages one after another, each when its last gradient is there

    end(message) = max(end of the one before, its last gradient) + seconds(its bytes)

`group_order` also finds out whether groups wait for each other in a ring. `best_messages` cuts
gradients, in the order they become ready, into the messages that are through soonest:

    f(j) = least over i of  max(f(i), ready(j)) + seconds(bytes of i+1 … j)

which is exact for messages of neighbours: an earlier f(i) never makes f(j) later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import floor
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.compiled import B1, F1, F2, I1, compiled
from foretell.search.fusion.problem import Wire, bucket_starts


@compiled
def group_order(
    group: I1, late: B1, copied: B1, source: I1, target: I1, read_start: I1, reads: I1
) -> I1:
    """The groups in the order they run, by the number of their first op; shorter where a ring is.

    A group's turn is that of its last op; what is `late` comes behind all that is not.
    """
    n = len(group)
    key = np.full(n, -1, np.int64)
    for i in range(n):
        key[group[i]] = max(key[group[i]], i + n if late[i] else i)
    if _is_sorted(group, key, copied, source, target, read_start, reads):
        return _by_key(group, key)
    start, after, waiting = _group_edges(group, copied, source, target, read_start, reads)
    heap, size = np.empty(n, np.int64), 0
    for g in range(n):
        if key[g] >= 0 and waiting[g] == 0:
            size = _push(heap, size, key[g])
    order, done = np.empty(n, np.int64), 0
    while size:
        g = group[heap[0] % n]
        size = _pop(heap, size)
        order[done] = g
        done += 1
        for e in range(start[g], start[g + 1]):
            b = after[e]
            waiting[b] -= 1
            if waiting[b] == 0:
                size = _push(heap, size, key[b])
    return order[:done]


@compiled
def _is_sorted(
    group: Any, key: Any, copied: Any, source: Any, target: Any, read_start: Any, reads: Any
) -> bool:
    """Whether every group's turn is behind those of all it reads: then turns are the order."""
    for e in range(len(source)):
        a, b = group[source[e]], group[target[e]]
        if a == b:
            continue
        if not copied[e]:
            if key[a] > key[b]:
                return False
            continue
        for k in range(read_start[source[e]], read_start[source[e] + 1]):
            if group[reads[k]] != b and key[group[reads[k]]] > key[b]:
                return False
    return True


@compiled
def _by_key(group: Any, key: Any) -> Any:
    """The groups by their turns, which are numbers of ops, or of late ops behind all."""
    n = len(group)
    order, many = np.empty(n, np.int64), 0
    for turn in range(2 * n):
        g = group[turn % n]
        if key[g] == turn:
            order[many] = g
            many += 1
    return order[:many]


@compiled
def _group_edges(
    group: Any, copied: Any, source: Any, target: Any, read_start: Any, reads: Any
) -> tuple[Any, Any, Any]:
    """Edges between groups in compressed rows; one that has a copy reads what the copy reads."""
    n, room = len(group), len(source)
    for e in range(len(source)):
        if copied[e]:
            room += read_start[source[e] + 1] - read_start[source[e]]
    one, two, many = np.empty(room, np.int64), np.empty(room, np.int64), 0
    for e in range(len(source)):
        a, b = group[source[e]], group[target[e]]
        if a == b:
            continue
        if not copied[e]:
            one[many], two[many] = a, b
            many += 1
            continue
        for k in range(read_start[source[e]], read_start[source[e] + 1]):
            a = group[reads[k]]
            if a != b:
                one[many], two[many] = a, b
                many += 1
    start, waiting = np.zeros(n + 1, np.int64), np.zeros(n, np.int64)
    for e in range(many):
        start[one[e] + 1] += 1
        waiting[two[e]] += 1
    for g in range(n):
        start[g + 1] += start[g]
    after, at = np.empty(many, np.int64), start[:-1].copy()
    for e in range(many):
        after[at[one[e]]] = two[e]
        at[one[e]] += 1
    return start, after, waiting


@compiled
def _push(heap: Any, size: Any, value: Any) -> Any:
    i = size
    while i and heap[(i - 1) // 2] > value:
        heap[i] = heap[(i - 1) // 2]
        i = (i - 1) // 2
    heap[i] = value
    return size + 1


@compiled
def _pop(heap: Any, size: Any) -> Any:
    """Take the least away; the new size."""
    size -= 1
    value, i = heap[size], 0
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = value
    return size


@compiled
def ends(order: I1, cost: F1, end: F1, first: int) -> float:
    """When each group ends, in place; groups before the place `first` stand. The last end."""
    now = end[order[first - 1]] if first else 0.0
    for k in range(first, len(order)):
        now += cost[order[k]]
        end[order[k]] = now
    return now


@compiled
def ends_waiting(order: I1, cost: F1, wait: F1, end: F1) -> float:
    """When each group ends, in place, none starting before its `wait` is over. The last end."""
    now = 0.0
    for k in range(len(order)):
        g = order[k]
        now = max(now, wait[g]) + cost[g]
        end[g] = now
    return now


@compiled
def seconds(size: float, laws: F2) -> float:
    """Time of one message, the quickest way."""
    least, root = np.inf, np.sqrt(size)
    for k in range(len(laws)):
        least = min(least, laws[k, 0] + laws[k, 1] * size + laws[k, 2] * root)
    return least


@compiled
def best_messages(ready: F1, sizes: F1, laws: F2) -> tuple[I1, float]:
    """Where messages begin among gradients in the order they are ready, and when all is through."""
    n = len(ready)
    through, begun, held = np.zeros(n + 1), np.zeros(n + 1, np.int64), np.zeros(n + 1)
    for j in range(n):
        held[j + 1] = held[j] + sizes[j]
    for j in range(1, n + 1):
        best, at = np.inf, j - 1
        for i in range(j - 1, -1, -1):
            found = max(through[i], ready[j - 1]) + seconds(held[j] - held[i], laws)
            if found < best:
                best, at = found, i
            if through[i] <= ready[j - 1]:  # to wait with more would only make it longer
                break
        through[j], begun[j] = best, at
    firsts, many, j = np.empty(n, np.int64), 0, n
    while j > 0:
        j = begun[j]
        firsts[many] = j
        many += 1
    return firsts[:many][::-1].copy(), through[n]


@compiled
def communication(
    ready: F1, sizes: F1, first: I1, member: I1, parts: I1, laws: F2, compute: float, update: float,
    by_message: bool, end: F1, done: F1, since: int,
) -> float:  # fmt: skip
    """When each bucket is through and updated, in place; those before the place `since` stand.

    Bucket b has the gradients `member[first[b]:first[b + 1]]` and goes in `parts[b]` messages.
    Updates come behind the last op: all together behind the last message, or each behind its own.
    The end of the step.
    """
    now = end[since - 1] if since else 0.0
    then = done[since - 1] if since else compute
    each = update / max(sizes.sum(), 1.0)
    for b in range(since, len(first) - 1):
        there, size = 0.0, 0.0
        for k in range(first[b], first[b + 1]):
            there = max(there, ready[member[k]])
            size += sizes[member[k]]
        now = max(now, there)
        for _ in range(parts[b]):
            now += seconds(size / parts[b], laws)
            then = max(then, now) + each * size / parts[b]
        end[b], done[b] = now, then
    return then if by_message else max(now, compute) + update


@compiled
def greedy(
    source: I1, target: I1, fits: B1, side: I1, ranked: I1, read_start: I1, read_edge: I1,
    reader_start: I1, reader_edge: I1, most: int,
) -> I1:  # fmt: skip
    """Ops fused pair by pair along `ranked` edges, over and over, until no pair may be: groups.

    A pair of groups is fused where all edges between them fit, they are of one side and of `most`
    ops together, and no path leads from one to the other by way of a third. Groups are kept in an
    order in which each is behind what it reads, so that such a path lies between the two.
    """
    n = len(side)
    group, last, then = np.arange(n), np.arange(n), np.full(n, -1, np.int64)
    place, at, mark = np.arange(n), np.arange(n), np.full(n, -1, np.int64)
    size, stack, held = np.ones(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    changed, turn = True, 0
    while changed:
        changed = False
        for k in range(len(ranked)):
            x, y = group[source[ranked[k]]], group[target[ranked[k]]]
            if x == y or side[x] != side[y] or size[x] + size[y] > most:
                continue
            a, b = (x, y) if place[x] < place[y] else (y, x)
            if not _all_fit(
                a, b, group, then, size, source, target, fits, read_start, read_edge, reader_start,
                reader_edge,
            ):  # fmt: skip
                continue
            turn += 1
            if _has_detour(
                a, b, turn, group, then, place, mark, stack, target, reader_start, reader_edge
            ):
                continue
            one, two = min(a, b), max(a, b)
            _reorder(a, b, one, turn, place, at, mark, held)
            i = two
            while i >= 0:
                group[i] = one
                i = then[i]
            then[last[one]] = two
            last[one] = last[two]
            size[one] += size[two]
            changed = True
    return group


@compiled
def _all_fit(
    a: Any, b: Any, group: Any, then: Any, size: Any, source: Any, target: Any, fits: Any,
    read_start: Any, read_edge: Any, reader_start: Any, reader_edge: Any,
) -> bool:  # fmt: skip
    """Whether every edge between two groups may be inside a kernel."""
    small, other = (a, b) if size[a] <= size[b] else (b, a)
    i = small
    while i >= 0:
        for k in range(read_start[i], read_start[i + 1]):
            if group[source[read_edge[k]]] == other and not fits[read_edge[k]]:
                return False
        for k in range(reader_start[i], reader_start[i + 1]):
            if group[target[reader_edge[k]]] == other and not fits[reader_edge[k]]:
                return False
        i = then[i]
    return True


@compiled
def _has_detour(
    a: Any, b: Any, turn: Any, group: Any, then: Any, place: Any, mark: Any, stack: Any,
    target: Any, reader_start: Any, reader_edge: Any,
) -> bool:  # fmt: skip
    """Whether b can be reached from a by way of another group; what is reached is marked."""
    stack[0], many = a, 1
    while many:
        many -= 1
        g = stack[many]
        i = g
        while i >= 0:
            for k in range(reader_start[i], reader_start[i + 1]):
                h = group[target[reader_edge[k]]]
                if h == b and g != a:
                    return True
                if h != a and h != b and place[h] < place[b] and mark[h] != turn:
                    mark[h] = turn
                    stack[many] = h
                    many += 1
            i = then[i]
    return False


@compiled
def _reorder(
    a: Any, b: Any, one: Any, turn: Any, place: Any, at: Any, mark: Any, held: Any
) -> None:
    """Two groups become one between what is not behind them and what was reached from the first."""
    low, high, many = place[a], place[b], 0
    to = low
    for k in range(low, high + 1):
        g = at[k]
        if g < 0 or g == a or g == b:  # noqa: SIM109
            continue
        if mark[g] == turn:
            held[many] = g
            many += 1
        else:
            at[to], place[g] = g, to
            to += 1
    at[to], place[one] = one, to
    to += 1
    for k in range(many):
        at[to], place[held[k]] = held[k], to
        to += 1
    for k in range(to, high + 1):
        at[k] = -1


# Buckets for DistributedDataParallel from one profile: `bucket_cap_mb_list=[…]`.
#
# DDP takes gradients in the order they become ready and closes a bucket when it has reached its
# cap, so any cut into neighbours can be said by a list of caps: the sizes of the buckets in MiB.


Array = npt.NDArray[np.float64]
DEFAULT = (1.0, 25.0)  # MiB: DDP's first bucket and all others (torch.nn.parallel.distributed)
SIZES = (1.0, 5.0, 10.0, 50.0, 100.0)  # MiB of even buckets that are tried besides
# Ops take longer in some steps than in the one that was profiled, most of all where sending needs
# the same cores: a cut has to do well for all of these.
STRETCHES = (0.8, 1.0, 1.25, 1.6)
_EVEN = (0.5, 1.0, 2.0, 5.0, 10.0, 25.0)  # MiB
_MIB = 2**20


@dataclass(frozen=True)
class Caps:
    """A way to cut gradients into buckets, and what the step is predicted to take with it."""

    name: str
    caps: tuple[float, ...]  # MiB; empty where DDP is left as it is
    messages: int
    step: float

    @property
    def line(self) -> str:
        """What a person adds to the call of DistributedDataParallel."""
        return f"bucket_cap_mb_list=[{', '.join(f'{c:g}' for c in self.caps)}]"


@dataclass(frozen=True, eq=False)
class Profile:
    """What one rank showed: when each gradient was there, in order, and how long it computes."""

    ready: Array  # seconds from the start of the step, ascending
    sizes: Array  # bytes
    compute: float  # forward and backward
    update: float


def candidates(profile: Profile, wire: Wire) -> list[Caps]:
    """DDP as it is first, then others, best prediction first; each cut only once."""
    n = len(profile.ready)
    cuts = {"default": even_cut(profile, DEFAULT[1], DEFAULT[0])}
    cuts["searched"] = robust_cut(profile, wire)
    cuts["one bucket"] = [0]
    cuts |= {f"{size:g} MiB": even_cut(profile, size) for size in SIZES}
    found: dict[tuple[int, ...], Caps] = {}
    for name, firsts in cuts.items():
        step = predicted_step(profile, wire, firsts)
        caps = () if name == "default" else as_caps(profile, firsts)
        found.setdefault(tuple(firsts), Caps(name, caps, len(firsts), step))
    default, *others = found.values()
    assert n, "a profile has gradients"
    return [default, *sorted(others, key=lambda c: c.step)]


def predicted_spread(profile: Profile, wire: Wire) -> tuple[float, float, float]:
    """Seconds of a step with DDP as it is: as profiled, and with ops as much shorter or longer."""
    firsts = even_cut(profile, DEFAULT[1], DEFAULT[0])
    worlds = (1.0, min(STRETCHES), max(STRETCHES))
    one, low, high = (predicted_step(_stretched(profile, s), wire, firsts) for s in worlds)
    return one, low, high


def _stretched(profile: Profile, times: float) -> Profile:
    return replace(profile, ready=profile.ready * times, compute=profile.compute * times)


def robust_cut(profile: Profile, wire: Wire) -> list[int]:
    """Where buckets begin that lose least to the best there is, if ops take longer than profiled.

    Tried are the best cut for each stretch of the ops, and even ones.
    """
    worlds = [_stretched(profile, s) for s in STRETCHES]
    best = [best_messages(w.ready, w.sizes, wire.laws)[0].tolist() for w in worlds]
    cuts: list[list[int]] = [*best, *(even_cut(profile, size) for size in _EVEN)]
    steps = np.array([[predicted_step(w, wire, firsts) for w in worlds] for firsts in cuts])
    lost = (steps / steps.min(axis=0)).max(axis=1)
    return cuts[int(np.argmin(lost))]


def even_cut(profile: Profile, most: float, first: float | None = None) -> list[int]:
    """Where buckets of so many MiB begin."""
    return bucket_starts(
        profile.sizes.tolist(), _MIB * most, _MIB * (most if first is None else first)
    )


def as_caps(profile: Profile, firsts: Sequence[int]) -> tuple[float, ...]:
    """Caps that DDP closes these buckets at: their sizes, rounded down by less than a number."""
    edges = [*firsts, len(profile.sizes)]
    sizes = [profile.sizes[a:b].sum() for a, b in pairwise(edges)]
    caps = [floor(size / _MIB * 1e6) / 1e6 for size in sizes]
    if len(caps) > 1 and caps[-1] <= caps[-2]:  # what is left over closes the last bucket anyway
        caps.pop()
    while len(caps) > 1 and caps[-1] == caps[-2]:  # DDP's last cap counts for all that follow
        caps.pop()
    return tuple(caps)


def predicted_step(profile: Profile, wire: Wire, firsts: Sequence[int]) -> float:
    """Seconds of a step with buckets that begin there."""
    many = len(firsts)
    first = np.array([*firsts, len(profile.sizes)], np.int64)
    member, parts = np.arange(len(profile.sizes)), np.ones(many, np.int64)
    return float(
        communication(
            profile.ready, profile.sizes, first, member, parts, wire.laws, profile.compute,
            profile.update, False, np.zeros(many), np.zeros(many), 0,
        )
    )  # fmt: skip
