"""Paths and cuts in a small undirected graph whose links carry their bandwidth each way.

    widest   the path whose narrowest link is widest; among those the quickest   → `widest`
    quickest the path of least latency; among those the fewest links             → `quickest`
    flow     how much can leave some vertices for others over all paths at once   → `flow`
    spread   the narrowest cut that parts any of the given vertices               → `spread`

By the max-flow min-cut theorem `spread` is what one member of a ring or tree over those vertices
can send while it receives as much: every ring crosses every cut in both directions.
Ties go to the lower vertex and link number, so answers never depend on memory or hash order.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import inf

Arc = tuple[int, int]  # (neighbour, link)


@dataclass(frozen=True)
class Wires:
    """Links between vertices 0 … size-1, in columns."""

    size: int
    ends: tuple[tuple[int, int], ...]
    bandwidth: tuple[float, ...]
    latency: tuple[float, ...]

    @cached_property
    def arcs(self) -> tuple[tuple[Arc, ...], ...]:
        """The neighbours of each vertex and the link to each, lowest first."""
        out: list[list[Arc]] = [[] for _ in range(self.size)]
        for link, (a, b) in enumerate(self.ends):
            out[a].append((b, link))
            out[b].append((a, link))
        return tuple(tuple(sorted(row)) for row in out)


def widest(wires: Wires, source: int, closed: Collection[int] = ()) -> dict[int, tuple[int, ...]]:
    """The links of the widest path to every vertex that can be reached.

    Vertices in `closed` may start or end a path but not be passed through.
    """
    width = _widths(wires, source, closed)
    found: dict[int, tuple[int, ...]] = {}
    for limit in sorted(set(width.values()), reverse=True):
        paths = quickest(wires, source, closed, limit)
        found |= {v: paths[v] for v, w in width.items() if w == limit}
    return found


def _widths(wires: Wires, source: int, closed: Collection[int]) -> dict[int, float]:
    best = {source: inf}
    heap = [(-inf, source)]
    while heap:
        width, here = heappop(heap)
        if -width < best[here] or (here in closed and here != source):
            continue
        for there, link in wires.arcs[here]:
            reach = min(-width, wires.bandwidth[link])
            if reach > best.get(there, 0.0):
                best[there] = reach
                heappush(heap, (-reach, there))
    return best


def quickest(
    wires: Wires, source: int, closed: Collection[int] = (), limit: float = 0.0
) -> dict[int, tuple[int, ...]]:
    """The links of the path of least latency to every vertex, over links of at least `limit`."""
    done: dict[int, tuple[int, ...]] = {}
    heap: list[tuple[float, int, tuple[int, ...], int]] = [(0.0, 0, (), source)]
    while heap:
        seconds, hops, path, here = heappop(heap)
        if here in done:
            continue
        done[here] = path
        if here in closed and here != source:
            continue
        for there, link in wires.arcs[here]:
            if there not in done and wires.bandwidth[link] >= limit:
                heappush(heap, (seconds + wires.latency[link], hops + 1, (*path, link), there))
    return done


def flow(
    wires: Wires,
    sources: Iterable[int],
    sinks: Iterable[int],
    *,
    links: Collection[int] | None = None,
    absent: Collection[int] = (),
) -> float:
    """Bytes/s that can go from all `sources` to all `sinks` at once, avoiding `absent` vertices."""
    room = _room(wires, links, absent)
    starts, targets = sorted(set(sources)), set(sinks)
    total = 0.0
    while path := _augment(room, starts, targets):
        amount = min(room[a][b] for a, b in path)
        for a, b in path:
            room[a][b] -= amount
            room[b][a] += amount
        total += amount
    return total


def _room(
    wires: Wires, links: Collection[int] | None, absent: Collection[int]
) -> list[dict[int, float]]:
    room: list[dict[int, float]] = [{} for _ in range(wires.size)]
    for link, (a, b) in enumerate(wires.ends):
        if (links is None or link in links) and a not in absent and b not in absent:
            room[a][b] = room[a].get(b, 0.0) + wires.bandwidth[link]
            room[b][a] = room[b].get(a, 0.0) + wires.bandwidth[link]
    return room


def _augment(
    room: Sequence[dict[int, float]], starts: Sequence[int], targets: Collection[int]
) -> list[tuple[int, int]]:
    """A shortest path with room on every link, found breadth first; empty when there is none."""
    came: dict[int, int] = dict.fromkeys(starts, -1)
    queue = deque(starts)
    while queue:
        here = queue.popleft()
        if here in targets:
            return _walk(came, here)
        for there, left in room[here].items():
            # Flows are sums of a few bandwidths: what is left of one below a byte/s is rounding.
            if left > 1.0 and there not in came:
                came[there] = here
                queue.append(there)
    return []


def _walk(came: dict[int, int], here: int) -> list[tuple[int, int]]:
    path = []
    while came[here] >= 0:
        path.append((came[here], here))
        here = came[here]
    return path


def spread(
    wires: Wires,
    members: Sequence[int],
    *,
    links: Collection[int] | None = None,
    absent: Collection[int] = (),
) -> float:
    """Bytes/s across the narrowest cut that parts the members; 0 when they are not connected."""
    first, *rest = members
    return min((flow(wires, [first], [v], links=links, absent=absent) for v in rest), default=inf)
