"""Stages with meshes of their own: as many replicas and tensor ranks as each segment has.

Every segment works on the same micro-batches. Its replicas have equal parts of one, in order, and
what crosses from segment to segment is cut where parts begin and end. The ranks that share a
replica all have its output; they take turns in sending it. The mean over a segment's replicas is
the gradient of the whole batch, so what comes back from a segment with other replicas is scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from foretell.errors import InputError
from foretell.plan.plan import Segment
from foretell.plan.stage_placement import Action
from foretell.pytorch.deploy.actions import Pipeline
from foretell.pytorch.deploy.blocks import Blocks
from foretell.pytorch.deploy.collective import new_groups
from foretell.pytorch.deploy.mesh import found_by_first
from foretell.pytorch.deploy.messages import Meta, tried
from foretell.pytorch.deploy.orders import pipeline as pipeline_of
from foretell.pytorch.deploy.pipelined import cut_model

Tensor = Any
_CUT = "segments can be cut only where tensors with a row for each sample pass"


class Rows(NamedTuple):
    """Samples of a stage's output on their way to a follower, or of its gradient back."""

    kind: str  # F or B
    stage: int  # whose output it is
    follower: int
    micro_batch: int
    first: int
    last: int


def shaped(
    model: Any, parts: Sequence[Segment], samples: int, call: Any
) -> tuple[Pipeline, list[Any]]:
    """The pipeline of a plan's segments, and the module of each."""
    plan = parts[0].plan
    size = 1 + max(rank for one in parts for rank in one.ranks)
    missing = set(range(size)) - {rank for one in parts for rank in one.ranks}
    if missing:
        raise InputError(f"rank {min(missing)} is in no segment of the plan")
    each = plan.micro_batch * plan.dp
    if samples % each:
        raise InputError(f"{samples} samples are no multiple of micro_batch={each}")
    pieces, after = cut_model(model, len(parts), tuple(one.blocks for one in parts), call)
    line = pipeline_of(plan, samples // each)
    orders: list[tuple[Action, ...]] = [()] * size
    for stage, one in enumerate(parts):
        for rank in one.ranks:
            orders[rank] = line.orders[stage]
    return Pipeline(tuple(orders), after), pieces


class Segments(Blocks):
    """The segment of this rank; `step` leaves the gradients of its replicas, whose mean is right.

    Every rank is given the whole batch and takes the samples of its replica.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        modules: Mapping[int, Any],
        loss: Callable[[Any, Any], Any],
        parts: Sequence[Segment],
        *,
        device: Any,
    ) -> None:
        self.replicas = [list(_replicas(one)) for one in parts]
        super().__init__(pipeline, modules, loss, device=device)
        ((self.stage, _),) = modules.items()
        self.replica = next(k for k, r in enumerate(self.replicas[self.stage]) if self.rank in r)
        self.late: list[tuple[Tensor, Any]] = []  # tied to other segments, with the ranks of all

    def tie(self, tied: Sequence[tuple[Tensor, tuple[int, ...]]]) -> None:
        """Parameters that other segments have too, in one order on all ranks."""
        groups = new_groups(ranks for _, ranks in tied)
        self.late = [(p, groups[ranks]) for p, ranks in tied if p.requires_grad]

    def settle(self) -> None:
        """Add up gradients of tied parameters, when those of each segment are whole."""
        size = sum(map(len, self.replicas[self.stage]))
        for parameter, group in self.late:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / size
            dist.all_reduce(grad, group=group)
            parameter.grad = grad

    # Who has what

    @property
    def _size(self) -> int:
        """Samples of a micro-batch."""
        return len(self._batch[0][0])

    def _own(self) -> slice:
        """This rank's samples of a micro-batch."""
        each = self._size // len(self.replicas[self.stage])
        return slice(self.replica * each, (self.replica + 1) * each)

    def _crossing(self, a: int, b: int) -> Iterator[tuple[int, int, int, int]]:
        """Replicas of two stages that have the same samples, and which."""
        one, other = (self._size // len(self.replicas[s]) for s in (a, b))
        for i in range(len(self.replicas[a])):
            for j in range(len(self.replicas[b])):
                first, last = max(i * one, j * other), min((i + 1) * one, (j + 1) * other)
                if first < last:
                    yield i, j, first, last

    def _leaving(self, rank: int, action: Action) -> Iterator[tuple[int, Rows]]:
        """What a rank sends after an action, and to which rank."""
        stage, kind, m = action
        if kind == "W":
            return
        others = self.pipeline.followers[stage] if kind == "F" else self.pipeline.after[stage]
        for other in others:
            ends = (stage, other) if kind == "F" else (other, stage)
            for i, j, first, last in self._crossing(stage, other):
                mine = self.replicas[stage][i]
                for k, to in enumerate(self.replicas[other][j]):
                    if mine[k % len(mine)] == rank:
                        yield to, Rows("F" if kind == "F" else "B", *ends, m, first, last)

    def _expected(self, pipeline: Pipeline) -> dict[int, list[Rows]]:
        found: dict[int, list[Rows]] = {}
        for source, order in enumerate(pipeline.orders):
            there = [m for a in order for to, m in self._leaving(source, a) if to == self.rank]
            if there:
                found[source] = there
        return found

    # What is done

    def _send(self, action: Action, made: Any) -> None:
        begins = self._own().start
        for to, rows in self._leaving(self.rank, action):
            tensors = made if rows.kind == "F" else made[rows.stage]
            self._post.send(to, [y[rows.first - begins : rows.last - begins] for y in tensors])

    def _empties(self, message: Rows) -> list[Tensor]:
        metas = [m for m in self._metas[message.stage] if m.has_grad or message.kind == "F"]
        return [self._with(m, message.last - message.first) for m in metas]

    def _with(self, meta: Meta, rows: int) -> Tensor:
        return meta._replace(shape=(rows, *meta.shape)).empty(self.device)

    def _output(self, stage: int, m: int) -> list[Tensor]:
        return self._joined("F", stage, self.stage, m, stage)

    def _gradient(self, stage: int, follower: int, m: int) -> list[Tensor]:
        scale = len(self.replicas[stage]) / len(self.replicas[follower])
        return [g * scale for g in self._joined("B", stage, follower, m, follower)]

    def _joined(self, kind: str, stage: int, follower: int, m: int, source: int) -> list[Tensor]:
        """This replica's samples, from the replicas of another segment."""
        found = [
            self._post.receive(Rows(kind, stage, follower, m, first, last))
            for _, j, first, last in self._crossing(source, self.stage)
            if j == self.replica
        ]
        return [torch.cat(rows) for rows in zip(*found, strict=True)]

    def _source(self, stage: int, m: int) -> list[Tensor]:
        return [x[self._own()] for x in super()._source(stage, m)]

    def _ended(self, chunk: int, made: Any) -> list[Tensor]:
        whole = self._targets
        if whole is not None and whole[chunk] is not None:
            self._targets = {chunk: whole[chunk][self._own()]}
        found = super()._ended(chunk, made)
        self._targets = whole
        return found

    def _grads_of(self, metas: Sequence[Meta], grads: Sequence[Tensor]) -> list[Tensor]:
        rows = self._own().stop - self._own().start
        pairs = zip(metas, grads, strict=True)
        return [self._with(meta, rows).zero_() if g is None else g for meta, g in pairs]

    def prepare(self, inputs: tuple[Any, ...]) -> None:
        """Learn from an example what segments send each other, so that no step stops at it."""
        chunks = [x.chunk(self.parts) for x in inputs]
        self._batch = [list(c) for c in zip(*chunks, strict=True)]
        self._negotiate()

    def _negotiate(self) -> None:
        seen = [(tuple(x.shape), x.dtype) for x in self._batch[0]]
        if seen == self._seen:
            return
        for stage, ranks in enumerate(self.pipeline.ranks):
            found = partial(self._try, stage) if self.pipeline.followers[stage] else list
            self._metas[stage] = found_by_first(ranks, found, _CUT)
        self._seen = seen

    def _try(self, stage: int) -> list[Meta]:
        rows = self._own().stop - self._own().start
        given = [
            self._with(meta, rows).zero_().requires_grad_(meta.has_grad)
            for before in self.pipeline.after[stage]
            for meta in self._metas[before]
        ]
        with torch.enable_grad():
            outputs = tried(self.modules[stage], given + self._source(stage, 0))
        for y in outputs:
            if not isinstance(y, torch.Tensor) or not y.dim() or len(y) != rows:
                raise InputError(
                    f"segment {stage} puts out {tuple(getattr(y, 'shape', ()))} for {rows} samples"
                )
        return [Meta(tuple(y.shape[1:]), y.dtype, y.requires_grad) for y in outputs]


def _replicas(one: Segment) -> Iterator[tuple[int, ...]]:
    """The ranks of each replica: neighbours in the order of the mesh."""
    inner = len(one.ranks) // one.plan.dp
    for first in range(0, len(one.ranks), inner):
        yield one.ranks[first : first + inner]
