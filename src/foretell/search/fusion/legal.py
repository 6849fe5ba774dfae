"""What may be fused: by class of op, size, reuse, side of the step, rings and memory.

class    what the compiler can put into one loop (→ `foretell.cost.fusion_class.may_fuse`)
reuse    nothing dear is recomputed for every reader of a broadcast
size     a kernel has `MOST` ops at most (torch._inductor.config.max_fusion_size)
side     forward and backward are compiled apart; a copy may cross, a group may not
ring     no group waits for itself by way of another: groups are convex
memory   a copy that has to keep more for the backward may not break the budget
"""

from __future__ import annotations

import numpy as np

from foretell.cost.fusion_class import is_fusible, may_fuse
from foretell.errors import InputError
from foretell.search.fusion.problem import Problem
from foretell.search.fusion.state import Fusion

MOST = 64
CHEAP = frozenset({"pointwise", "constant", "view", "cat"})  # worth computing twice
# Words whose place costs several additions (→ `foretell.cost.fused_traffic`): not for every reader.
_DEAR = frozenset(
    "exp log log1p expm1 sin cos tanh sigmoid erf gelu silu mish elu softplus pow".split()  # noqa: SIM905
) | {"gelu_backward", "silu_backward"}
_REDUCE = ("reduction", "norm")


def edge_fits(problem: Problem, edge: int) -> bool:
    """Whether the reader of an edge may share a kernel with its maker: class, sizes, reuse."""
    i, j = int(problem.source[edge]), int(problem.target[edge])
    maker, reader = problem.ops[i], problem.ops[j]
    kinds = problem.kinds
    if maker.word in _DEAR and reader.looped > maker.elements and kinds[j] not in _REDUCE:
        return False
    rows = maker.looped if kinds[i] in _REDUCE else reader.elements
    return may_fuse(
        kinds[i], kinds[j], made=maker.elements, looped=reader.looped, rows=rows,
        template=problem.epilogue,
    )  # fmt: skip


def merge(state: Fusion, a: int, b: int) -> Fusion | None:
    """Two groups as one, or None where that is not allowed."""
    return None if why_not(state, a, b) else _whole(state.merged(a, b))


def why_not(state: Fusion, a: int, b: int) -> str:
    """What forbids that two groups become one; rings are found when they are one."""
    problem, one, two = state.problem, state.of(a), state.of(b)
    if a == b:
        return "they are one already"
    if problem.ops[one[0]].side != problem.ops[two[0]].side:
        return "one is of the forward, one of the backward"
    if len(one) + len(two) > MOST:
        return f"{len(one) + len(two)} ops are more than the {MOST} of one kernel"
    edges = between(state, a, b)
    if not edges:
        return "neither reads the other"
    for edge in edges:
        if not edge_fits(problem, edge):
            i, j = problem.source[edge], problem.target[edge]
            return _unfit(problem, int(i), int(j))
    return ""


def _unfit(problem: Problem, i: int, j: int) -> str:
    for k in (i, j):
        if not is_fusible(problem.kinds[k]):
            return f"`{problem.ops[k].name}` is a {problem.ops[k].word}, which is never fused"
    for k, where in ((j, "in front of"), (i, "behind")):
        if problem.kinds[k] == "template":
            return f"nothing is fused {where} `{problem.ops[k].name}`, a {problem.ops[k].word}"
    return (
        f"`{problem.ops[j].name}` ({problem.ops[j].word}, {problem.ops[j].looped:g} places) does "
        f"not loop over what `{problem.ops[i].name}` makes ({problem.ops[i].elements:g})"
    )


def between(state: Fusion, a: int, b: int) -> list[int]:
    """The edges from one group to another, either way."""
    small, other = (a, b) if len(state.of(a)) <= len(state.of(b)) else (b, a)
    problem, found = state.problem, []
    for i in state.of(small):
        for rows in (problem.reads[i], problem.readers[i]):
            found += [edge for j, edge in rows if state.group[j] == other]
    return found


def copy(state: Fusion, edge: int) -> Fusion | None:
    """The reader of an edge with a copy of what it reads, or None where that is not allowed."""
    if not may_copy(state, edge):
        return None
    found = _whole(state.with_copy(edge))
    if found is not None and crosses(state.problem, edge) and not holds_no_more(state, found):
        return None
    return found


def may_copy(state: Fusion, edge: int) -> bool:
    """Whether a copy is allowed, rings and memory left out."""
    problem = state.problem
    i, j = int(problem.source[edge]), int(problem.target[edge])
    if state.copied[edge] or state.group[i] == state.group[j] or problem.kinds[i] not in CHEAP:
        return False
    if len(state.of(int(state.group[j]))) + 1 > MOST or _is_copy_of_copy(state, i, j):
        return False
    return edge_fits(problem, edge)


def crosses(problem: Problem, edge: int) -> bool:
    """Whether an edge leads from the forward into the backward."""
    one, two = (problem.ops[int(k[edge])].side for k in (problem.source, problem.target))
    return one != two


def holds_no_more(state: Fusion, found: Fusion) -> bool:
    """Whether a state fits into memory, or holds no more than the one before."""
    return found.held <= state.problem.room or found.held <= state.held


def _is_copy_of_copy(state: Fusion, i: int, j: int) -> bool:
    """Whether a copy of i for j would be read by, or read, another copy: copies read memory."""
    problem = state.problem
    deeper = any(state.copied[edge] for _, edge in problem.reads[i])
    return deeper or any(state.copied[edge] for _, edge in problem.readers[j])


def _whole(state: Fusion) -> Fusion | None:
    return state if state.is_ring_free else None


def require(state: Fusion) -> Fusion:
    """The same state, or an error that names the first thing wrong with it."""
    problem = state.problem
    for ops in state.members.values():
        _require_group(problem, ops)
    for edge in np.flatnonzero(state.copied).tolist():
        _require_copy(state, edge)
    if not state.is_ring_free:
        stuck = set(state.members) - set(state.order.tolist())
        group = min(stuck, default=0)
        names = ", ".join(f"`{problem.ops[i].name}`" for i in state.of(group)[:6])
        raise InputError(
            f"the region of {names} waits for itself by way of an op outside it",
            hint="put the ops between them into the region too, or take some out",
        )
    if state.held > problem.room:
        raise InputError(
            f"the plan keeps {state.held / 2**30:.1f} GiB, a device has {problem.room / 2**30:.1f}",
            hint="recompute less inside fused regions, or lower the batch",
        )
    return state


def _require_copy(state: Fusion, edge: int) -> None:
    """An error unless a copy is cheap, fits its reader and reads memory."""
    problem = state.problem
    i, j = int(problem.source[edge]), int(problem.target[edge])
    name, reader = problem.ops[i].name, problem.ops[j].name
    if problem.kinds[i] not in CHEAP:
        raise InputError(f"`{name}` is a {problem.ops[i].word}, which is not computed twice")
    if not edge_fits(problem, edge):
        raise InputError(f"`{name}` cannot be copied for `{reader}`: {_unfit(problem, i, j)}")
    if _is_copy_of_copy(state, i, j):
        raise InputError(f"the copy of `{name}` for `{reader}` reads or is read by another copy")


def _require_group(problem: Problem, ops: tuple[int, ...]) -> None:
    """An error unless a group can be grown from one op, edge by edge, each allowed."""
    inside, todo, seen = set(ops), [ops[0]], {ops[0]}
    names = ", ".join(f"`{problem.ops[i].name}`" for i in ops[:6])
    if len(ops) > MOST:
        raise InputError(f"the region of {names} … has {len(ops)} ops; a kernel has {MOST} at most")
    if len({problem.ops[i].side for i in ops}) > 1:
        raise InputError(f"the region of {names} spans forward and backward")
    while todo:
        i = todo.pop()
        for j, edge in (*problem.reads[i], *problem.readers[i]):
            if j not in inside:
                continue
            if not edge_fits(problem, edge):
                one, two = int(problem.source[edge]), int(problem.target[edge])
                raise InputError(f"the region of {names} cannot be: {_unfit(problem, one, two)}")
            if j not in seen:
                seen.add(j)
                todo.append(j)
    if seen != inside:
        apart = problem.ops[min(inside - seen)].name
        raise InputError(f"the region of {names} falls apart: `{apart}` reads none of the others")
