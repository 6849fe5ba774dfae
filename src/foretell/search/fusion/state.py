"""One way to fuse a step: which ops are one kernel, and which are recomputed for a reader.

    group     ops with the same number are one kernel (the number of their first op)
    copied    edges whose reader has a copy of what it reads inside its own kernel: the maker is
              computed twice, and nothing waits for the other's kernel (duplicate fusion)
    late      ops that nothing in the step reads, such as the gradient of a weight, put off behind
              all others: what is on the way to the first layers goes first

States are values: a move gives a new one and leaves the old as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foretell.search.fusion.lanes import arrange
from foretell.search.fusion.problem import BACKWARD, FORWARD, Problem

Whole = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


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

    def leaves(self, i: int) -> bool:
        """Whether what an op makes is written to memory."""
        if self.problem.ops[i].kept:
            return True
        own = self.group[i]
        for reader, edge in self.problem.readers[i]:
            if self.group[reader] != own and not self.copied[edge]:
                return True
            for far, again in self.problem.readers[reader]:  # a copy of a reader reads it too
                if self.copied[again] and self.is_copied(again) and self.group[far] != own:
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
        return all(self.is_copied(edge) for _, edge in readers)

    @cached_property
    def order(self) -> Whole:
        """The groups in the order they run."""
        p = self.problem
        return np.asarray(arrange(self.group, self.late, self.copied, p.source, p.target, *p.rows))

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
            if problem.ops[reader].side == BACKWARD and not self.is_copied(edge):
                return True
            for far, again in problem.readers[reader]:
                if self.is_copied(again) and problem.ops[far].side == BACKWARD:
                    return True
        return False

    def merged(self, a: int, b: int) -> Fusion:
        """Two groups as one."""
        ops = tuple(sorted((*self.of(a), *self.of(b))))
        group, members = self.group.copy(), dict(self.members)
        for g in (a, b):
            members.pop(g, None)
        members[ops[0]] = ops
        group[list(ops)] = ops[0]
        return replace(self, group=group, copied=self._cleared(group, ops), members=members)

    def merge_here(self, a: int, b: int) -> None:
        """Two groups as one, in place: for a state that no other holds yet."""
        ops = tuple(sorted((*self.of(a), *self.of(b))))
        for g in (a, b):
            self.members.pop(g, None)
        self.members[ops[0]] = ops
        self.group[list(ops)] = ops[0]
        for i in ops:
            for reader, edge in self.problem.readers[i]:
                if self.copied[edge] and self.group[reader] == ops[0]:
                    self.copied[edge] = False

    def _cleared(self, group: Whole, ops: tuple[int, ...]) -> Flags:
        """Copies without those that are inside one group now."""
        if not self.copied.any():
            return self.copied
        copied = self.copied.copy()
        for i in ops:
            for reader, edge in self.problem.readers[i]:
                copied[edge] &= group[reader] != group[i]
        return copied

    def take_out_here(self, i: int) -> None:
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
