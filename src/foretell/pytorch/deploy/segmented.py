"""Stages whose ranks have samples of their own, and what of them crosses between stages.

Segments are stages with meshes of their own: as many replicas and tensor ranks as each has.
Every segment works on the same micro-batches. Its replicas have parts of one, in order, equal or as
its shares say, and what crosses from segment to segment is cut where parts begin and end. The ranks
that share a replica all have its output; they take turns in sending it. The mean over a segment's
replicas is the gradient of the whole batch: so what comes back from a segment with other replicas
is scaled, and the mean loss of a replica with n of N samples counts n · replicas / N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from foretell.errors import InputError
from foretell.plan.layer_ranges import Move
from foretell.plan.plan import Segment, micro_samples
from foretell.plan.stage_placement import Action
from foretell.pytorch.deploy.actions import Pipeline
from foretell.pytorch.deploy.actions import pipeline as pipeline_of
from foretell.pytorch.deploy.blocks import Blocks, Meta
from foretell.pytorch.deploy.collective import new_groups
from foretell.pytorch.deploy.pipelined import cut_model

Tensor = Any
_FEW = 2  # samples that shapes are found with


class RowMessage(NamedTuple):
    """Samples of a stage's output on their way to a follower, or of its gradient back."""

    kind: str  # F or B
    stage: int  # whose output it is
    follower: int
    micro_batch: int
    first: int
    last: int


class RowStages(Blocks):
    """Stages whose ranks have samples of their own; what crosses is cut where these begin and end.

    Every rank is given the whole batch and takes its own samples itself.
    """

    hint = "stages can be cut only where tensors with a row for each sample pass"
    _is_trying = False

    def _moves(self, kind: str, stage: int, follower: int, m: int) -> Iterable[Move]:
        """What of a stage's output goes to a follower (F), or of its gradient comes back (B)."""
        raise NotImplementedError

    def _span(self, stage: int, m: int) -> slice:
        """This rank's samples of a micro-batch."""
        raise NotImplementedError

    def _named(self, stage: int) -> str:
        return f"stage {stage}"

    def _own(self, stage: int, m: int) -> slice:
        """This rank's samples of a micro-batch; a few of them to find shapes with."""
        few = min(_FEW, len(self._batch[m][0]))
        return slice(0, few) if self._is_trying else self._span(stage, m)

    def _leaving(self, rank: int, action: Action) -> Iterator[tuple[int, RowMessage]]:
        """What a rank sends after an action, and to which rank."""
        stage, kind, m = action
        if kind == "W":
            return
        word = "F" if kind == "F" else "B"
        for other in self.pipeline.followers[stage] if kind == "F" else self.pipeline.after[stage]:
            ends = (stage, other) if kind == "F" else (other, stage)
            for move in self._moves(word, *ends, m):
                if move.source == rank != move.target:
                    yield move.target, RowMessage(word, *ends, m, move.first, move.last)

    def _expected(self, pipeline: Pipeline) -> dict[int, list[RowMessage]]:
        found: dict[int, list[RowMessage]] = {}
        for source, order in enumerate(pipeline.orders):
            there = [m for a in order for to, m in self._leaving(source, a) if to == self.rank]
            if there:
                found[source] = there
        return found

    def _send(self, action: Action, made: Any) -> None:
        begins = self._own(action.stage, action.micro_batch).start
        for to, rows in self._leaving(self.rank, action):
            tensors = made if rows.kind == "F" else made[rows.stage]
            self._post.send(to, [y[rows.first - begins : rows.last - begins] for y in tensors])

    def _output(self, stage: int, follower: int, m: int) -> list[Tensor]:
        here = super()._output(stage, follower, m) if (stage, m) in self._outputs else []
        return self._joined("F", stage, follower, m, here)

    def _gradient(self, stage: int, follower: int, m: int) -> list[Tensor]:
        here = self._grads.pop((stage, follower, m), [])
        return self._joined("B", stage, follower, m, here)

    def _joined(
        self, kind: str, stage: int, follower: int, m: int, here: Sequence[Tensor]
    ) -> list[Tensor]:
        """This rank's samples, from others and from what is here, put together in order."""
        source, found = stage if kind == "F" else follower, []
        for move in self._moves(kind, stage, follower, m):
            if move.target != self.rank:
                continue
            if move.source == self.rank:
                begins = self._own(source, m).start
                cut = slice(move.first - begins, move.last - begins)
                found.append([y.detach()[cut] for y in here])
            else:
                message = RowMessage(kind, stage, follower, m, move.first, move.last)
                found.append(self._post.receive(message))
        return [torch.cat(rows) for rows in zip(*found, strict=True)]

    def _empties(self, message: RowMessage) -> list[Tensor]:
        metas = [m for m in self._metas[message.stage] if m.has_grad or message.kind == "F"]
        return [m.with_rows(message.last - message.first).empty(self.device) for m in metas]

    def _zeros(self, stage: int, m: int, meta: Meta) -> Tensor:
        own = self._own(stage, m)
        return meta.with_rows(own.stop - own.start).empty(self.device).zero_()

    def _source(self, stage: int, m: int) -> list[Tensor]:
        return [x[self._own(stage, m)] for x in super()._source(stage, m)]

    def _target(self, stage: int, m: int) -> Any:
        whole = super()._target(stage, m)
        return None if whole is None else whole[self._own(stage, m)]

    def _negotiate(self) -> None:
        self._is_trying = True
        super()._negotiate()
        self._is_trying = False

    def _meta(self, stage: int, output: Tensor) -> Meta:
        samples = self._own(stage, 0).stop
        is_tensor = isinstance(output, torch.Tensor)
        has_rows = is_tensor and output.dim() and len(output) == samples
        if self.pipeline.followers[stage] and not has_rows:
            shape = tuple(output.shape) if is_tensor else type(output).__name__
            raise InputError(f"behind {self._named(stage)} {samples} samples have become {shape}")
        return Meta(tuple(output.shape[1:]), output.dtype, output.requires_grad)


def shaped(
    model: Any, parts: Sequence[Segment], samples: int, call: Any
) -> tuple[Pipeline, list[Any]]:
    """The pipeline of a plan's segments, and the module of each."""
    plan = parts[0].plan
    size = 1 + max(rank for one in parts for rank in one.ranks)
    missing = set(range(size)) - {rank for one in parts for rank in one.ranks}
    if missing:
        raise InputError(f"rank {min(missing)} is in no segment of the plan")
    each = micro_samples(plan)
    if samples % each:
        raise InputError(f"{samples} samples are no multiple of micro_batch={each}")
    pieces, after = cut_model(model, len(parts), tuple(one.blocks for one in parts), call)
    line = pipeline_of(plan, samples // each)
    orders: list[tuple[Action, ...]] = [()] * size
    for stage, one in enumerate(parts):
        for rank in one.ranks:
            orders[rank] = line.orders[stage]
    return Pipeline(tuple(orders), after), pieces


class Segments(RowStages):
    """The segment of this rank; `step` leaves gradients whose mean over its replicas is right."""

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
        self.shares = [one.plan.shares or (1,) * one.plan.dp for one in parts]
        super().__init__(pipeline, modules, loss, device=device)
        ((self.stage, _),) = modules.items()
        self.replica = next(k for k, r in enumerate(self.replicas[self.stage]) if self.rank in r)
        shares = self.shares[self.stage]
        self.share = shares[self.replica] * len(shares) / sum(shares)  # of this rank's loss
        self.weights = [weight * self.share for weight in self.weights]
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

    def _named(self, stage: int) -> str:
        return f"segment {stage}"

    def _span(self, stage: int, m: int) -> slice:
        return self._spans(stage)[self.replica]

    def _spans(self, stage: int) -> list[slice]:
        """The samples of a micro-batch that each replica of a stage has."""
        shares, samples = self.shares[stage], len(self._batch[0][0])
        ends = [samples * n // sum(shares) for n in accumulate(shares)]
        return [slice(first, last) for first, last in zip([0, *ends], ends, strict=False)]

    def _require_batch(self, inputs: tuple[Any, ...]) -> None:
        super()._require_batch(inputs)
        samples = len(inputs[0]) // self.parts
        for shares in self.shares:
            if any(samples * n % sum(shares) for n in shares):
                raise InputError(
                    f"micro-batches of {samples} samples for replicas with shares of {shares}"
                )

    def _moves(self, kind: str, stage: int, follower: int, m: int) -> Iterator[Move]:
        """From the replicas that have the same samples; their ranks take turns in sending."""
        a, b = (stage, follower) if kind == "F" else (follower, stage)
        for one, sources in zip(self._spans(a), self.replicas[a], strict=True):
            for other, targets in zip(self._spans(b), self.replicas[b], strict=True):
                first, last = max(one.start, other.start), min(one.stop, other.stop)
                for k, target in enumerate(targets if first < last else ()):
                    yield Move(sources[k % len(sources)], target, first, last)

    def _gradient(self, stage: int, follower: int, m: int) -> list[Tensor]:
        scale = len(self.replicas[stage]) / len(self.replicas[follower])
        return [g * scale for g in super()._gradient(stage, follower, m)]


def _replicas(one: Segment) -> Iterator[tuple[int, ...]]:
    """The ranks of each replica: neighbours in the order of the mesh."""
    inner = len(one.ranks) // one.plan.dp
    for first in range(0, len(one.ranks), inner):
        yield one.ranks[first : first + inner]
