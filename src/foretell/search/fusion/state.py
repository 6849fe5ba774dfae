"""One way to fuse a step, what may be fused, and single changes of it.

    group     ops with the same number are one kernel (the number of their first op)
    copied    edges whose reader has a copy of what it reads wherever it is itself: in its kernel,
              and in every kernel that has a copy of it, so that copies may be as deep as chains of
              ops are. The maker is computed twice, and nothing waits for the other's kernel
              (duplicate fusion). Inside one group only copies of the reader have one
    late      ops that nothing in the step reads, such as the gradient of a weight, put off behind
              all others: what is on the way to the first layers goes first

States are values: a move gives a new one and leaves the old as it was.

What may be fused: by class of op, size, reuse, side of the step, rings and memory.

class    what the compiler can put into one loop (→ `foretell.cost.fused_regions.may_fuse`)
reuse    nothing dear is recomputed for every reader of a broadcast
size     a kernel has `MOST` ops at most (torch._inductor.config.max_fusion_size)
side     forward and backward are compiled apart; a copy may cross, a group may not
ring     no group waits for itself by way of another: groups are convex
memory   a copy that has to keep more for the backward may not break the budget

Single changes to a way of fusing, each with the groups whose price it changes.

merge     two groups become one
copy      a reader gets a copy of a cheap maker, or of all that the maker's kernel makes it from
drop      a copy is dropped again
take out  an op leaves its group
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretell.cost.fused_regions import is_fusible, may_fuse
from foretell.errors import InputError
from foretell.search.fusion.lanes import group_order
from foretell.search.fusion.problem import BACKWARD, FORWARD, Problem

Whole = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


MOST = 64
CHEAP = frozenset({"pointwise", "constant", "view", "cat"})  # worth computing twice
# Words whose place costs several additions (→ `foretell.cost.fused_regions`): not for every reader.
_DEAR = frozenset(
    "exp log log1p expm1 sin cos tanh sigmoid erf gelu silu mish elu softplus pow".split()  # noqa: SIM905
) | {"gelu_backward", "silu_backward"}
_REDUCE = ("reduction", "norm")


@dataclass(frozen=True, eq=False)
class Fusion:
    """Groups and copies of one problem."""

    problem: Problem
    group: Whole
    copied: Flags
    members: dict[int, tuple[int, ...]]  # groups of more than one op
    late: Flags

    def of(self, g: int) -> tuple[int, ...]:
        """The ops of a group, in order."""
        return self.members.get(g, (g,))

    def is_copied(self, edge: int) -> bool:
        """Whether the reader of an edge has its own copy; inside one group nothing needs one."""
        problem = self.problem
        inside = self.group[problem.source[edge]] == self.group[problem.target[edge]]
        return bool(self.copied[edge]) and not inside

    def copies(self, g: int) -> set[int]:
        """Ops of other groups that a kernel recomputes, for its ops and for such copies."""
        own = set(self.of(g))
        return self._along_copies([i for i in own if not self.is_dead(i)], own)

    def carried(self, i: int) -> set[int]:
        """An op, and what every copy of it has copies of."""
        return {i} | self._along_copies([i], {i})

    def homes(self, i: int) -> set[int]:
        """Other groups that may compute an op again: for a reader, or for a copy of one."""
        found = {int(self.group[k]) for k in self._along_copies([i], {i}, back=True)}
        return found - {int(self.group[i])} if found else found

    def _along_copies(self, todo: list[int], known: set[int], back: bool = False) -> set[int]:
        """Ops reached over copied edges, from readers to makers or back, without the known ones."""
        rows, found = self.problem.readers if back else self.problem.reads, set[int]()
        while todo:
            for k, edge in rows[todo.pop()]:
                if self.copied[edge] and k not in known and k not in found:
                    found.add(k)
                    todo.append(k)
        return found

    def leaves(self, i: int) -> bool:
        """Whether what an op makes is written to memory."""
        if self.problem.ops[i].kept:
            return True
        own = int(self.group[i])
        for reader, edge in self.problem.readers[i]:
            if self.copied[edge]:
                continue  # wherever the reader is, it has its own
            if self.group[reader] != own or self.homes(reader) - {own}:
                return True
        return False

    def is_dead(self, i: int) -> bool:
        """Whether nothing reads an op any more: all its readers have copies."""
        readers = self.problem.readers[i]
        if (
            self.problem.ops[i].kept
            or not readers
            or not self.copied[[e for _, e in readers]].all()
        ):
            return False
        return all(self.is_copied(edge) or self.is_dead(reader) for reader, edge in readers)

    @cached_property
    def order(self) -> Whole:
        """The groups in the order they run.

        What reads a copy of a copy has plain edges from all that is read there.
        """
        p, copied, source, target = self.problem, self.copied, self.problem.source, None
        reads_copy = np.zeros(len(self.group), bool)
        reads_copy[p.target[copied]] = True
        deep = np.flatnonzero(copied & reads_copy[source]).tolist()
        if deep:
            flags, known = copied.tolist(), dict[int, set[int]]()

            def read(i: int) -> set[int]:
                """What a copy of an op reads from memory, through its own copies."""
                if i not in known:
                    each = [read(k) if flags[edge] else {k} for k, edge in p.reads[i]]
                    known[i] = set[int]().union(*each)
                return known[i]

            more = [(k, int(p.target[e])) for e in deep for k in sorted(read(int(source[e])))]
            one, target = np.array(more, np.int64).reshape(-1, 2).T
            source = source.copy()
            source[deep] = p.target[deep]  # nothing is read along these themselves
            source = np.concatenate([source, one])
            copied = np.concatenate([copied, np.zeros(len(more), bool)])
        target = p.target if target is None else np.concatenate([p.target, target])
        return np.asarray(group_order(self.group, self.late, copied, source, target, *p.rows))

    @property
    def num_groups(self) -> int:
        """Kernels, dead ones counted."""
        return len(self.problem) - sum(len(m) - 1 for m in self.members.values())

    @property
    def is_ring_free(self) -> bool:
        """Whether no group waits for itself by way of others."""
        return len(self.order) == self.num_groups

    @cached_property
    def key(self) -> bytes:
        """The same for two states exactly when they fuse alike."""
        return (
            self.group.tobytes()
            + np.packbits(self.copied).tobytes()
            + np.packbits(self.late).tobytes()
        )

    @cached_property
    def held(self) -> float:
        """Bytes of what the forward keeps for the backward, with all that is there anyway."""
        problem, kept = self.problem, 0.0
        for i, op in enumerate(problem.ops):
            if op.side == FORWARD and self._is_kept(i):
                kept += op.bytes
        put_off = {j for i in np.flatnonzero(self.late).tolist() for j, _ in problem.reads[i]}
        longer = sum(problem.ops[j].bytes for j in put_off if problem.ops[j].side == BACKWARD)
        return problem.held + kept + longer

    def _is_kept(self, i: int) -> bool:
        """Whether the backward reads what a forward op makes, itself or through a copy."""
        problem = self.problem
        for reader, edge in problem.readers[i]:
            if self.copied[edge]:
                continue
            where = {reader, *self.homes(reader)}
            if any(problem.ops[k].side == BACKWARD for k in where):
                return True
        return False

    def merged(self, a: int, b: int) -> Fusion:
        """Two groups as one."""
        found = self.draft()
        found.merge_in_place(a, b)
        return found

    def merge_in_place(self, a: int, b: int) -> None:
        """Two groups as one, in place: for a state that no other holds yet."""
        ops = tuple(sorted((*self.of(a), *self.of(b))))
        for g in (a, b):
            self.members.pop(g, None)
        self.members[ops[0]] = ops
        self.group[list(ops)] = ops[0]
        readers, copied = self.problem.readers, self.copied
        for i in reversed(ops if copied.any() else ()):
            for reader, edge in readers[i]:  # copies inside the group serve copies of the reader
                if copied[edge] and self.group[reader] == ops[0]:
                    copied[edge] = any(copied[again] for _, again in readers[reader])

    def take_out_in_place(self, i: int) -> None:
        """An op by itself again, in place: for a state that no other holds yet."""
        g = int(self.group[i])
        rest = tuple(o for o in self.members.pop(g) if o != i)
        self.group[list(rest)] = rest[0]
        self.group[i] = i
        if len(rest) > 1:
            self.members[rest[0]] = rest

    def with_copy(self, edge: int, is_on: bool = True) -> Fusion:
        """The reader of an edge with its own copy of what it reads, or without."""
        copied = self.copied.copy()
        copied[edge] = is_on
        return replace(self, copied=copied)

    def draft(self) -> Fusion:
        """The same state with columns of its own, to be changed in place before it is used."""
        return replace(
            self, group=self.group.copy(), copied=self.copied.copy(), members=dict(self.members)
        )

    def put_off(self, ops: Sequence[int]) -> Fusion:
        """These ops, and only these, behind all others."""
        late = np.zeros(len(self.problem), bool)
        late[list(ops)] = True
        return replace(self, late=late)


def unfused(problem: Problem) -> Fusion:
    """Every op a kernel of its own."""
    n = len(problem)
    return Fusion(problem, np.arange(n), np.zeros(len(problem.source), bool), {}, np.zeros(n, bool))


def fused(
    problem: Problem, groups: list[tuple[int, ...]], copies: list[int] | None = None
) -> Fusion:
    """The state with these groups and copied edges."""
    state = unfused(problem)
    group, members = state.group.copy(), {}
    for ops in (tuple(sorted(g)) for g in groups if len(g) > 1):
        group[list(ops)] = ops[0]
        members[ops[0]] = ops
    copied = state.copied.copy()
    copied[copies or []] = True
    return Fusion(problem, group, copied, members, state.late)


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


def merged_if_legal(state: Fusion, a: int, b: int) -> Fusion | None:
    """Two groups as one, or None where that is not allowed."""
    found = None if merge_obstacle(state, a, b) else state.merged(a, b)
    return found if found is not None and found.is_ring_free else None


def merge_obstacle(state: Fusion, a: int, b: int) -> str:
    """What forbids that two groups become one; rings are found when they are one."""
    problem, one, two = state.problem, state.of(a), state.of(b)
    if a == b:
        return "they are one already"
    if problem.ops[one[0]].side != problem.ops[two[0]].side:
        return "one is of the forward, one of the backward"
    if len(one) + len(two) > MOST:
        return f"{len(one) + len(two)} ops are more than the {MOST} of one kernel"
    edges = edges_between(state, a, b)
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


def edges_between(state: Fusion, a: int, b: int) -> list[int]:
    """The edges from one group to another, either way."""
    small, other = (a, b) if len(state.of(a)) <= len(state.of(b)) else (b, a)
    problem, found = state.problem, []
    for i in state.of(small):
        for rows in (problem.reads[i], problem.readers[i]):
            found += [edge for j, edge in rows if state.group[j] == other]
    return found


def copied_if_legal(state: Fusion, edge: int) -> Fusion | None:
    """The reader of an edge with a copy of what it reads, or None where that is not allowed."""
    if not may_copy(state, edge):
        return None
    found = state.with_copy(edge)  # no ring: who waited for the maker waits for what it reads
    room = state.problem.room
    if crosses_sides(state, edge) and found.held > room and found.held > state.held:
        return None
    return found


def may_copy(state: Fusion, edge: int) -> bool:
    """Whether a copy is allowed, rings and memory left out."""
    problem = state.problem
    i, j = int(problem.source[edge]), int(problem.target[edge])
    if state.copied[edge] or problem.kinds[i] not in CHEAP:
        return False
    if state.group[i] == state.group[j] and not state.homes(j):
        return False
    if len(state.of(int(state.group[j]))) + len(state.carried(i)) > MOST:
        return False
    return edge_fits(problem, edge)


def crosses_sides(state: Fusion, edge: int) -> bool:
    """Whether an edge leads from the forward into the backward, itself or for a copy."""
    problem = state.problem
    i, j = int(problem.source[edge]), int(problem.target[edge])
    return any(problem.ops[k].side != problem.ops[i].side for k in (j, *state.homes(j)))


def holds_no_more(state: Fusion, found: Fusion) -> bool:
    """Whether a state fits into memory, or holds no more than the one before."""
    return found.held <= state.problem.room or found.held <= state.held


def require_legal(state: Fusion) -> Fusion:
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
    """An error unless a copy is cheap and fits its reader."""
    problem = state.problem
    i, j = int(problem.source[edge]), int(problem.target[edge])
    name, reader = problem.ops[i].name, problem.ops[j].name
    if problem.kinds[i] not in CHEAP:
        raise InputError(f"`{name}` is a {problem.ops[i].word}, which is not computed twice")
    if not edge_fits(problem, edge):
        raise InputError(f"`{name}` cannot be copied for `{reader}`: {_unfit(problem, i, j)}")


def _require_group(problem: Problem, ops: tuple[int, ...]) -> None:
    """An error unless a group can be grown from one op, edge by edge, each allowed."""
    inside, names = set(ops), ", ".join(f"`{problem.ops[i].name}`" for i in ops[:6])
    if len(ops) > MOST:
        raise InputError(f"the region of {names} … has {len(ops)} ops; a kernel has {MOST} at most")
    if len({problem.ops[i].side for i in ops}) > 1:
        raise InputError(f"the region of {names} spans forward and backward")
    for i, (j, edge) in ((k, row) for k in ops for row in problem.reads[k]):
        if j in inside and not edge_fits(problem, edge):
            raise InputError(f"the region of {names} cannot be: {_unfit(problem, j, i)}")
    if left := inside - _connected(problem, ops):
        apart = problem.ops[min(left)].name
        raise InputError(f"the region of {names} falls apart: `{apart}` reads none of the others")


class Change(NamedTuple):
    """A state after a move, and the groups that cost something else now."""

    fusion: Fusion
    touched: tuple[int, ...]


def merge(fusion: Fusion, a: int, b: int) -> Change | None:
    """Two groups as one."""
    found = merged_if_legal(fusion, a, b)
    if found is None:
        return None
    own = int(found.group[fusion.of(a)[0]])
    return Change(found, tuple({own, *groups_freed_of_reads(fusion, found, own)}))


def groups_freed_of_reads(fusion: Fusion, found: Fusion, own: int) -> set[int]:
    """Groups whose results copies read that are not needed any more inside the merged group."""
    problem, groups = fusion.problem, set[int]()
    for i in found.of(own):
        for reader, edge in problem.readers[i]:
            if fusion.copied[edge] and found.group[reader] == own:
                groups |= _read_by(found, i)
    return groups


def _read_by(fusion: Fusion, i: int) -> set[int]:
    """Groups that a copy of an op may read from."""
    reads = fusion.problem.reads
    return {int(fusion.group[k]) for c in fusion.carried(i) for k, _ in reads[c]}


def copy(fusion: Fusion, edge: int) -> Change | None:
    """A copy for the reader of an edge."""
    found = copied_if_legal(fusion, edge)
    if found is None:
        return None
    return Change(found, affected_by_copy(found, edge))


def copy_kernel(fusion: Fusion, edge: int) -> Change | None:
    """A copy for the reader of an edge with all of the maker's kernel that it is made from.

    DisCo recomputes a fused op as a whole; where some of it is dear, its last op alone.
    """
    problem, draft = fusion.problem, fusion.draft()
    maker = int(problem.source[edge])
    own, edges, todo = fusion.group[maker], [edge], [maker]
    while todo:
        for k, read in problem.reads[todo.pop()]:
            if fusion.group[k] == own and read not in edges:
                edges.append(read)
                todo.append(k)
    if len(edges) == 1 or not all(may_copy(draft.with_copy(edge), e) for e in edges[1:]):
        return copy(fusion, edge)
    draft.copied[edges] = True
    alone = not may_copy(fusion, edge) or not draft.is_ring_free
    if alone or (crosses_sides(fusion, edge) and not holds_no_more(fusion, draft)):
        return copy(fusion, edge)
    return Change(draft, tuple({g for e in edges for g in affected_by_copy(draft, e)}))


def drop(fusion: Fusion, edge: int) -> Change | None:
    """The copy of an edge's reader dropped."""
    found = fusion.with_copy(edge, False)
    return Change(found, affected_by_copy(found, edge)) if found.is_ring_free else None


def take_out(fusion: Fusion, i: int) -> Change | None:
    """An op out of its group; what is left has to hang together."""
    g = int(fusion.group[i])
    if g not in fusion.members:
        return None
    if not may_leave(fusion, i):
        return None
    found = fusion.draft()
    found.take_out_in_place(i)
    if not found.is_ring_free:
        return None
    return Change(found, affected_by_exit(found, i, [o for o in fusion.of(g) if o != i]))


def may_leave(fusion: Fusion, i: int) -> bool:
    """Whether a group hangs together without an op; rings left out."""
    rest = tuple(o for o in fusion.members.get(int(fusion.group[i]), ()) if o != i)
    return bool(rest) and len(_connected(fusion.problem, rest)) == len(rest)


def affected_by_exit(found: Fusion, i: int, rest: Sequence[int]) -> tuple[int, ...]:
    """The groups whose price changes once an op has left others."""
    problem = found.problem
    copied = [edge for o in (i, *rest) for _, edge in problem.reads[o] if found.copied[edge]]
    more = {m for edge in copied for m in affected_by_copy(found, edge)}
    return tuple({i, rest[0], *more})


def random_change(fusion: Fusion, edges: list[int], dice: random.Random) -> Change | None:
    """A random change at a random edge; None where it is not allowed."""
    e, problem = dice.choice(edges), fusion.problem
    i, j = int(problem.source[e]), int(problem.target[e])
    a, b = int(fusion.group[i]), int(fusion.group[j])
    if a == b:
        if fusion.homes(j) and dice.random() < 0.5:
            return drop(fusion, e) if fusion.copied[e] else copy(fusion, e)
        return take_out(fusion, dice.choice((i, j)))
    if fusion.copied[e]:
        return drop(fusion, e)
    return merge(fusion, a, b) if dice.random() < 0.6 else copy(fusion, e)


def affected_by_copy(fusion: Fusion, edge: int) -> tuple[int, ...]:
    """The groups whose price a copy may change: readers, maker, and what the maker reads."""
    problem = fusion.problem
    i, j = int(problem.source[edge]), int(problem.target[edge])
    near = {int(fusion.group[k]) for k in (i, j)}
    return tuple(near | fusion.homes(j) | _read_by(fusion, i))


def _connected(problem: Problem, ops: tuple[int, ...]) -> set[int]:
    """Those of some ops that hang together with the first."""
    inside, seen, todo = set(ops), {ops[0]}, [ops[0]]
    while todo:
        i = todo.pop()
        for j, _ in (*problem.reads[i], *problem.readers[i]):
            if j in inside and j not in seen:
                seen.add(j)
                todo.append(j)
    return seen


def fitting_edges(problem: Problem) -> list[int]:
    """Edges along which anything may be fused at all."""
    return [e for e in range(len(problem.source)) if edge_fits(problem, e)]


def deferrable_gradients(problem: Problem) -> list[list[int]]:
    """Ops that may be put off, gradients of weights that nothing else reads, in two orders.

    The last of the step first, so that the wire is fed until then; or dearest a byte first, so that
    little is left to send behind them.
    """
    sent = np.bincount(problem.producer, problem.sizes, len(problem)).tolist()
    own = [i for i in np.unique(problem.producer).tolist() if not problem.readers[i]]

    def dear(i: int) -> tuple[float, int]:
        return -float(f"{problem.ops[i].seconds / max(sent[i], 1.0):.1e}"), -i

    return [sorted(own, reverse=True), sorted(own, key=dear)]
