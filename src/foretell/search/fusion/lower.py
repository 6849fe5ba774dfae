"""A way to fuse as a graph: what the simulator simulates, and what a report shows.

The lanes of `foretell.search.fusion.lanes` are this graph's lanes; a test holds both to the same
seconds.
"""

from __future__ import annotations

from foretell.graph import Builder, Graph
from foretell.search.fusion.lanes import seconds
from foretell.search.fusion.score import Evaluator, Scored
from foretell.search.fusion.state import Fusion


def lower(judge: Evaluator, scored: Scored, stretch: float = 1.0) -> Graph:
    """One step: groups on a stream, messages on the wire, updates behind them.

    With `stretch` every task takes so many times what the lanes of the search give it.
    """
    make = Builder()
    lanes = make.lane("compute", kind="compute"), make.lane("wire", kind="comm")
    there = _gathers(make, lanes[1], judge, scored)
    if scored.before:
        make.task(
            kind="kernel", op="fused", name="micro-batches before the last", lane=lanes[0],
            seconds=scored.before, phase="forward",
        )  # fmt: skip
        there = {}  # parameters were there for the first of them
    task = _groups(make, lanes[0], scored, there)
    _messages(make, lanes, judge, scored, task)
    problem = judge.problem
    graph = make.graph(workload=problem.model, ranks=problem.wire.ranks)
    if stretch == 1.0:
        return graph
    with graph.edit() as edit:
        edit.scale(edit.select(), stretch)
    return edit.graph


def _gathers(make: Builder, wire: int, judge: Evaluator, scored: Scored) -> dict[int, int]:
    """Parameters that come while the forward runs; for each group the last message it waits for."""
    problem, there = judge.problem, dict[int, int]()
    for bucket in scored.gathers.lists() if scored.gathers else []:
        size = float(problem.sizes[bucket].sum())
        message = make.task(
            kind="collective", op="all_gather", name=_named(scored, bucket), lane=wire,
            seconds=float(seconds(size, problem.wire.halves[1])), comm_bytes=size,
            group=f"0-{problem.wire.ranks - 1}", phase="communicate",
        )  # fmt: skip
        there |= dict.fromkeys(scored.fusion.group[problem.used[bucket]].tolist(), message)
    return there


def _groups(make: Builder, stream: int, scored: Scored, there: dict[int, int]) -> dict[int, int]:
    fusion, problem = scored.fusion, scored.fusion.problem
    task: dict[int, int] = {}
    for g in fusion.order.tolist():
        ops = [problem.ops[i] for i in fusion.of(g)]
        task[g] = make.task(
            kind="kernel",
            op="fused" if len(ops) > 1 else ops[0].word,
            name=" + ".join(op.name for op in ops),
            lane=stream,
            seconds=float(scored.cost[g]),
            phase="backward" if ops[0].side else "forward",
            after=sorted(
                {task[a] for a in _waits(fusion, g)} | ({there[g]} if g in there else set())
            ),
        )
    return task


def _waits(fusion: Fusion, g: int) -> set[int]:
    """Groups that a group reads from; through a copy, those the copy reads from."""
    problem, found = fusion.problem, set[int]()
    for i in fusion.of(g):
        for j, edge in problem.reads[i]:
            makers = [k for k, _ in problem.reads[j]] if fusion.is_copied(edge) else [j]
            found |= {int(fusion.group[k]) for k in makers}
    return found - {g}


def _messages(
    make: Builder, lanes: tuple[int, int], judge: Evaluator, scored: Scored, task: dict[int, int]
) -> None:
    problem, fusion = scored.fusion.problem, scored.fusion
    op = "reduce_scatter" if scored.gathers else "all_reduce"
    share = judge.update / max(float(problem.sizes.sum()), 1.0)
    sent: list[tuple[int, float]] = []
    for b, bucket in enumerate(scored.buckets.lists()):
        parts = int(scored.buckets.parts[b])
        size = float(problem.sizes[bucket].sum()) / parts
        after = sorted({task[int(fusion.group[problem.producer[k]])] for k in bucket})
        for _ in range(parts):
            message = make.task(
                kind="collective", op=op, name=_named(scored, bucket), lane=lanes[1],
                seconds=float(seconds(size, judge.laws)), comm_bytes=size,
                group=f"0-{problem.wire.ranks - 1}", phase="communicate", after=after,
            )  # fmt: skip
            sent.append((message, share * size))
    updates = sent if judge.by_message else [(sent[-1][0], judge.update)]
    for message, each in updates:
        last = make.task(
            kind="kernel", op="optimizer", name="update", lane=lanes[0], seconds=each,
            phase="update", after=[message],
        )  # fmt: skip
    if scored.launches:
        make.task(
            kind="kernel", op="launch", name="waiting for the host to launch kernels",
            lane=lanes[0], seconds=scored.launches, phase="update", after=[last],
        )  # fmt: skip


def _named(scored: Scored, bucket: list[int]) -> str:
    names = [scored.fusion.problem.gradients[k].name for k in bucket]
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
