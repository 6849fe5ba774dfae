"""How fast graphs are played and edited: the figures of the docs, as ratios taken in one run.

    python benchmarks/simulator.py [--quick]

CPU seconds of this process, best of several: other programs on the machine hardly disturb them.
"""

import heapq
import resource
import sys
import time

import numpy as np
from table import Row, show

from foretell.graph import Graph, Lanes, Names, assemble, edges
from foretell.simulate import simulate
from foretell.simulate.engine import full


def random_graph(n: int, lanes: int = 64, waits: int = 3, window: int = 1000, **more) -> Graph:
    """A random DAG: each task waits for three of the thousand before it."""
    rng = np.random.default_rng(0)
    waiting = np.repeat(np.arange(1, n), waits)
    after = np.maximum(0, waiting - 1 - rng.integers(0, window, len(waiting)))
    ordered = np.full(lanes, more.get("ordered", False))
    table = Lanes(np.zeros(lanes), np.arange(1, lanes + 1), np.full(lanes, 2), ordered)
    columns = {"seconds": rng.random(n), "lane": rng.integers(0, lanes, n)}
    names = Names(["", *(f"lane {k}" for k in range(lanes))])
    return assemble(n, columns, edges(n, waiting, after), lanes=table, names=names)


def cpu(work, times: int = 5) -> float:
    """The least CPU time of several runs."""
    spent = []
    for _ in range(times):
        begin = time.process_time()
        work()
        spent.append(time.process_time() - begin)
    return min(spent)


def plain_heapq(graph: Graph):
    """A bare event loop on Python's heapq, without causes or ties by number: the usual way."""
    n, lanes = graph.size, len(graph.lanes)
    follow: list[list[int]] = [[] for _ in range(n)]
    for i, p in zip(graph.edges.waiting.tolist(), graph.edges.after.tolist(), strict=True):
        follow[p].append(i)
    count = np.diff(graph.edges.start).tolist()
    seconds, lane = graph.seconds.tolist(), graph.lane.tolist()

    def run() -> float:
        left, queue, events = list(count), [[] for _ in range(lanes)], []
        busy, now = [0] * lanes, 0.0
        for i in range(n):
            if not left[i]:
                heapq.heappush(queue[lane[i]], (0.0, i))
        todo = list(range(lanes))
        while True:
            for k in todo:
                if not busy[k] and queue[k]:
                    i = heapq.heappop(queue[k])[1]
                    busy[k] = 1
                    heapq.heappush(events, (now + seconds[i], i))
            if not events:
                return now
            now, i = heapq.heappop(events)
            busy[lane[i]] = 0
            todo = [lane[i]]
            for j in follow[i]:
                left[j] -= 1
                if not left[j]:
                    heapq.heappush(queue[lane[j]], (now, j))
                    todo.append(lane[j])

    return run


def engines(quick: bool) -> list[Row]:
    n = 10**5 if quick else 10**6
    graph, ordered = random_graph(n), random_graph(n, ordered=True)
    full(graph), full(ordered)
    free_rate, path_rate = n / cpu(lambda: full(graph)), n / cpu(lambda: full(ordered))
    small = random_graph(20_000)
    full(small)
    readable = 20_000 / cpu(lambda: simulate(small, engine="readable"), 1)
    usual = plain_heapq(random_graph(10**5))
    usual()
    heap_rate = 10**5 / cpu(usual, 3)
    return [
        Row(f"free lanes, {n:,} tasks, 64 lanes", f"{free_rate / 1e6:.1f} M tasks/s", "≥ 5"),
        Row(f"ordered lanes, {n:,} tasks", f"{path_rate / 1e6:.1f} M tasks/s"),
        Row("over the readable engine", f"{free_rate / readable:,.0f} ×", "≥ 50"),
        Row("over a bare heapq loop", f"{free_rate / heap_rate:.1f} ×"),
    ]


def growth(quick: bool) -> list[Row]:
    sizes = [10**4, 10**5, 10**6] + ([] if quick else [10**7])
    cost = {}
    for n in sizes:
        graph = random_graph(n)
        full(graph)
        cost[n] = cpu(lambda g=graph: full(g), 5 if n < 10**7 else 2) / (n * np.log2(n))
    worst = max(cost.values()) / cost[sizes[0]]
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    span = f"10⁴ to 10{'⁶' if quick else '⁷'} tasks"
    return [
        Row(f"growth over n log n, {span}", f"{worst:.2f} ×", "≤ 1.5"),
        Row("largest memory of this run", f"{gib:.1f} GiB", "≤ 16"),
    ]


def incremental() -> list[Row]:
    n = 100_000
    rows = []
    for name, more in (("free", {}), ("ordered", {"ordered": True})):
        graph = random_graph(n, **more)
        before = simulate(graph)
        edit = graph.edit("late")
        edit.scale(np.arange(n - n // 10, n, 50), 1.5)
        after = edit.commit()
        simulate(after, before=before)
        once = cpu(lambda g=after: simulate(g, engine="compiled"), 9)
        again = cpu(lambda g=after, b=before: simulate(g, before=b), 9)
        rows.append(Row(f"re-simulate an edit of the last tenth, {name} lanes",
                        f"{once / again:.1f} × ({again * 1e3:.1f} ms)", "≥ 5 ×"))  # fmt: skip
    return rows


def verbs(quick: bool) -> list[Row]:
    n = 10**5 if quick else 10**6
    graph = random_graph(n)

    def scale():
        edit = graph.edit("scale")
        edit.scale(edit.select(kind="host", lane=(1, 2, 3)), 0.5)
        edit.commit()

    def insert():
        edit = graph.edit("insert")
        edit.insert(after=np.arange(0, n, 10), kind="kernel", lane=0, seconds=1e-6)
        edit.commit()

    def remove():
        edit = graph.edit("remove")
        edit.remove(np.arange(0, n, 10))
        edit.commit()

    for verb in (scale, insert, remove):
        verb()
    return [
        Row(f"select + scale on {n:,} tasks", f"{cpu(scale):.3f} s", "≤ 0.2"),
        Row(f"insert {n // 10:,} tasks into {n:,}", f"{cpu(insert, 3):.3f} s", "≤ 1"),
        Row(f"remove {n // 10:,} tasks of {n:,}", f"{cpu(remove, 3):.3f} s"),
    ]


def rows(quick: bool = False) -> list[Row]:
    """All figures of the simulator and the graph."""
    return engines(quick) + incremental() + verbs(quick) + growth(quick)


if __name__ == "__main__":
    show("Simulator and graph", rows("--quick" in sys.argv))
