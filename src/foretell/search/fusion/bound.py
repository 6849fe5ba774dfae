"""How short a step could be at best: what is left to gain.

    proven    no plan of the space is shorter. Ops that nothing may be fused with take their own
              seconds, all others none; a gradient is there when such ops among all it depends on
              have run, r(j); what was not there before r(j) is sent behind it, S(j), with one start
              and the least slope:

                  max( Σ seconds, max over j of  r(j) + start + slope · bytes of S(j) )

    overlap   max(compute, wire): the paper's full overlap, nothing waits for anything. Compute is
              that of the shortest fusion the search found, the wire one message of all gradients.
    bound     the same, but no gradient leaves before it is there in that fusion: what messages
              alone can still gain.

To compute belongs what the host adds that launches the kernels: of ops that cannot be fused in what
is proven. The update is added to all three, unless it runs message by message. Sharded, the wire
also carries every parameter once, before or while ops run, and what is proven holds for either way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.search.fusion.legal import edge_fits
from foretell.search.fusion.problem import Problem
from foretell.search.fusion.score import Evaluator, Scored

Array = npt.NDArray[np.float64]


class Bounds(NamedTuple):
    """Seconds of a step."""

    proven: float
    overlap: float
    bound: float


def bounds(judge: Evaluator, shortest: Scored) -> Bounds:
    """The bounds of a problem, two of them for the fusion whose ops are shortest."""
    ways = [Evaluator(judge.problem, judge.by_message, s) for s in {False, judge.sharded}]
    least = _launched(judge.problem)
    return Bounds(
        min(max(proven(way), least) + (0.0 if way.by_message else way.update) for way in ways),
        *of_kernels(judge, shortest),
    )


def of_kernels(judge: Evaluator, scored: Scored) -> tuple[float, float]:
    """Full overlap, and the best messages there could be, with the kernels of one fusion."""
    update = 0.0 if judge.by_message else judge.update
    none = np.zeros(len(judge.problem.sizes))
    compute = judge.problem.repeats * float(scored.cost[scored.fusion.order].sum())
    overlap = max(compute, _through(judge, none)) + update
    return overlap + scored.launches, conditional(judge, scored) + scored.launches


def _launched(problem: Problem) -> float:
    """What compute and the launches of kernels that cannot be fused take at the least."""
    if problem.reference is None:
        return 0.0
    p, free = problem.reference.exponent, free_ops(problem)
    kernels = int((~free).sum()) + bool(free.any())
    compute = problem.repeats * float(fixed_seconds(problem).sum())
    host = problem.reference.host * kernels * problem.repeats
    return float(portable.power(portable.power(compute, p) + portable.power(host, p), 1 / p))


def conditional(judge: Evaluator, shortest: Scored) -> float:
    """The last of the bounds alone: what a search asks for again and again."""
    update = 0.0 if judge.by_message else judge.update
    return max(shortest.compute, _through(judge, shortest.ready)) + update


def proven(judge: Evaluator) -> float:
    """What no plan of the space is below, the update left out."""
    problem = judge.problem
    least = fixed_seconds(problem)
    behind = _ancestors(problem)
    before = (problem.repeats - 1) * float(least.sum())
    ready = np.array([before + least[_bits(behind[g.op])].sum() for g in problem.gradients])
    return max(before + float(least.sum()), _through(judge, ready))


def fixed_seconds(problem: Problem) -> Array:
    """Own seconds of ops that nothing may be fused with or copied into; none for all others."""
    return np.where(free_ops(problem), 0.0, [op.seconds for op in problem.ops])


def free_ops(problem: Problem) -> npt.NDArray[np.bool_]:
    """Which ops may be fused with another."""
    free = np.zeros(len(problem), bool)
    for edge in range(len(problem.source)):
        if edge_fits(problem, edge):
            free[[problem.source[edge], problem.target[edge]]] = True
    return free


def _ancestors(problem: Problem) -> list[int]:
    """For each op those it depends on, itself included, as the bits of a number."""
    found: list[int] = []
    for i in range(len(problem)):
        mine = 1 << i
        for j, _ in problem.reads[i]:
            mine |= found[j]
        found.append(mine)
    return found


def _bits(number: int) -> npt.NDArray[np.int64]:
    raw = np.frombuffer(number.to_bytes(number.bit_length() // 8 + 1, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(raw, bitorder="little"))


def _through(judge: Evaluator, ready: Array) -> float:
    """The soonest that all gradients can be through, each sent when it is there or later."""
    sizes = judge.problem.sizes
    order = np.argsort(ready, kind="stable")
    later = np.cumsum(sizes[order][::-1])[::-1]
    start, slope = _least(judge.laws)
    soonest = float((ready[order] + start + slope * later).max())
    if not judge.sharded:
        return soonest
    first, each = _least(judge.problem.wire.halves[1])
    total = float(sizes.sum())
    return max(soonest, first + each * total + start + slope * total)


def _least(laws: Array) -> tuple[float, float]:
    return float(laws[:, 0].min()), float(laws[:, 1].min())
