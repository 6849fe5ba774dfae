"""Layers on ranks of their own: stages whose ranks have samples of their own.

Groups: each rank runs the runs of layers it holds, on its own samples.

Between two runs the activations of a micro-batch are cut where the samples of ranks begin and end,
and each part goes to the rank that has it next (→ foretell.plan.layer_ranges); gradients go the
same way back. Both ends know the order of messages from the plan, so only shapes are negotiated,
once. A run that is split has all samples on each of its ranks, and parts of its layers.

Gradients are parts of one sum: the loss of a rank counts by its share of the batch, and what
crosses from run to run is the gradient of that. So ranks of a run add up, whatever their samples.

Segments are stages with meshes of their own: as many replicas and tensor ranks as each has.
Every segment works on the same micro-batches. Its replicas have parts of one, in order, equal or as
its shares say, and what crosses from segment to segment is cut where parts begin and end. The ranks
that share a replica all have its output; they take turns in sending it. The mean over a segment's
replicas is the gradient of the whole batch: so what comes back from a segment with other replicas
is scaled, and the mean loss of a replica with n of N samples counts n · replicas / N.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.plan.check import (
    LayerGroup,
    group_samples,
    layer_groups,
    micro_batches_of_groups,
    sync_methods,
)
from foretell.plan.layer_ranges import Move, edges, handed, orders
from foretell.plan.plan import Segment, micro_samples
from foretell.plan.stage_placement import Action
from foretell.pytorch.deploy.actions import Pipeline
from foretell.pytorch.deploy.actions import pipeline as pipeline_of
from foretell.pytorch.deploy.batch_norm import norms, synchronize_norms
from foretell.pytorch.deploy.blocks import Blocks, Meta
from foretell.pytorch.deploy.buckets import send_buffers
from foretell.pytorch.deploy.channels import split_all
from foretell.pytorch.deploy.collective import new_groups
from foretell.pytorch.deploy.pipelined import cut_model
from foretell.pytorch.deploy.precision import dtype_of
from foretell.pytorch.deploy.sync import Sync, refusal, synchronize
from foretell.pytorch.deploy.units import layers

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
        raise NotImplementedError

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
        # the ranks of each replica: neighbours in the order of the mesh
        inner = [len(one.ranks) // one.plan.dp for one in parts]
        self.replicas = [
            [one.ranks[first : first + n] for first in range(0, len(one.ranks), n)]
            for one, n in zip(parts, inner, strict=True)
        ]
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


class Groups(RowStages):
    """The runs of this rank; `step` leaves the gradients of the whole batch."""

    hint = "runs can be cut only where tensors with a row for each sample pass"

    def __init__(
        self, plan: Plan, pieces: Sequence[Any], loss: Callable[[Any, Any], Any], device: Any
    ) -> None:
        self.plan, self.runs, self.batches = plan, layer_groups(plan), micro_batches_of_groups(plan)
        self.batch, rank = self.runs[0].batch, dist.get_rank()
        self.is_split = [run.way == "split" for run in self.runs]
        self.samples = [group_samples(run, self.batches) for run in self.runs]
        modules = {q: pieces[q] for q, run in enumerate(self.runs) if rank in run.samples}
        self.tied, self.turns = tied(pieces, self.runs), turns(pieces)
        self.syncs: dict[int, Sync] = {}  # by run, or below zero: of several runs
        self.steps, self._hooks = 0, list[Any]()
        # of each set of ranks that this one is in; no group where it is alone
        mine = {tuple(sorted(r.ranks)) for r in self.runs if rank in r.ranks and len(r.ranks) > 1}
        each = [new_groups(mine) for _ in Pair._fields]
        self._groups = {frozenset(ranks): Pair(*(made[ranks] for made in each)) for ranks in mine}
        # of each run, by layer that has factors: rows a sample
        self._rows: dict[int, dict[str, float]] = {}
        self._known: dict[Any, list[Move]] = {}
        weights = [samples.get(rank, 0) / self.batch for samples in self.samples[-1]]
        alone = [q for q, run in enumerate(self.runs) if run.way == "split" or len(run.ranks) == 1]
        self._norms = {q: norms(piece) for q, piece in enumerate(pieces) if q not in alone}
        super().__init__(self._shape(), modules, loss, device=device, weights=weights)
        for q in self.modules:
            if self.is_split[q]:
                split_all(self.modules[q], self._groups[frozenset(self.runs[q].ranks)].split)

    def _shape(self, together: Collection[int] = ()) -> Pipeline:
        """The runs as stages, each rank's actions in order; ranks communicate inside some runs."""
        wide = {q for q, is_split in enumerate(self.is_split) if is_split}
        found = orders([run.ranks for run in self.runs], self.batches, wide.union(together))
        rows = (found.get(rank, ()) for rank in range(dist.get_world_size()))
        actions = (tuple(Action(a.run, a.kind, a.micro_batch) for a in row) for row in rows)
        return Pipeline(tuple(actions), is_joint=False)

    @property
    def share(self) -> float:
        """By what this rank's mean loss counts; nothing where it has none."""
        return float(self.runs[-1].samples.get(self.rank, 0))

    def step(self, inputs: tuple[Any, ...], target: Any) -> Any:
        """Run every micro-batch there and back; the mean loss on ranks of the last run, else None.

        Every rank is given the whole batch and takes the samples that are its own.
        """
        self.steps += 1
        loss = super().step(inputs, target)
        self._share_buffers()
        return loss

    def infer(self, inputs: tuple[Any, ...]) -> dict[int, Any]:
        """Refused: its ranks have other samples at its end than at its beginning."""
        raise InputError("layers on ranks of their own only train here")

    def settle(self) -> None:
        """Wait until the gradients here are those of the whole batch."""
        for run in sorted(self.syncs, reverse=True):  # as backward goes, on every rank
            self.syncs[run].finish()

    def attach(self, optimizer: Any) -> None:
        """After each update, hand out what only one rank has done."""

        def share(*_: Any) -> None:
            for run in sorted(self.syncs, reverse=True):
                self.syncs[run].share()

        self._hooks.append(optimizer.register_step_post_hook(share))

    def owns(self, parameter: Tensor) -> bool:
        return all(sync.owns(parameter) for sync in self.syncs.values())

    def close(self) -> None:
        """Let hooks and process groups of its runs go; no step can be taken after it."""
        for one in (*self._hooks, *self.syncs.values()):
            one.remove()
        for pair in self._groups.values():
            for group in pair:
                dist.destroy_process_group(group)
        self._groups = {}

    def synchronize_norms(self) -> None:
        """Let batch norms of a run see the samples of all its ranks."""
        normed = {q: names for q, names in self._norms.items() if names}
        groups = new_groups(self.runs[q].ranks for q in normed if q in self.modules)
        for q, names in normed.items():
            if not all(n for micro in self.samples[q] for n in micro.values()):
                raise InputError(
                    f"`{names[0]}` needs the statistics of all ranks, and some of its run have no "
                    "sample of a micro-batch",
                    hint="take a larger micro_batch, or batch_norm=local",
                )
            if q in self.modules:
                synchronize_norms(self.modules[q], groups[tuple(self.runs[q].ranks)])
        self.pipeline = self._shape(normed)

    # Who has what

    def _require_batch(self, inputs: tuple[Any, ...]) -> None:
        if len(inputs[0]) != self.batch:
            raise InputError(
                f"a batch of {len(inputs[0])} samples for a plan of {self.batch}",
                hint="every rank gives `step` the whole batch, and takes its own samples itself",
            )

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        bounds = [m * self.batch // self.batches for m in range(self.batches + 1)]
        return [tensor[first:last] for first, last in pairwise(bounds)]

    def _moves(self, kind: str, stage: int, follower: int, m: int) -> list[Move]:
        a, b = (stage, follower) if kind == "F" else (follower, stage)
        if (a, b, m) not in self._known:
            self._known[a, b, m] = handed(
                self.samples[a][m], self.samples[b][m], from_all=self.is_split[a],
                to_all=self.is_split[b],
            )  # fmt: skip
        return self._known[a, b, m]

    def _span(self, stage: int, m: int) -> slice:
        if self.is_split[stage]:
            return slice(0, self.samples[stage][m][self.rank])
        place = self.runs[stage].ranks.index(self.rank)
        return slice(*edges([*self.samples[stage][m].values()])[place : place + 2])

    def _named(self, stage: int) -> str:
        return f"layer `{self.runs[stage].last}`"

    # What is done

    def _run(self, action: Action) -> None:
        """Run it where there are samples; gradients leave with the last micro-batch."""
        stage, kind, m = action
        is_last = kind == "B" and m + 1 == self.batches
        if self.samples[stage][m][self.rank]:
            if kind == "B" and (sync := self.syncs.get(stage)) is not None:
                is_whole = all(self.samples[stage][-1].values())
                for part in sync.parts:  # gradients leave as they are made
                    part.is_syncing = is_last and (is_whole or part is not sync.factors)
            super()._run(action)
        if is_last and stage in self.syncs:
            self.syncs[stage].begin()

    def _forward(self, action: Action, arguments: list[Tensor]) -> list[Tensor]:
        if not self.is_split[action.stage]:
            return super()._forward(action, arguments)
        with torch.random.fork_rng():  # ranks of a split run draw the same numbers
            turn = (self.steps * len(self.runs) + action.stage) * self.batches
            torch.manual_seed(turn + action.micro_batch)
            return super()._forward(action, arguments)

    # Once

    def _negotiate(self) -> None:
        """Besides, let the ranks of each run agree on its gradients from here on."""
        seen = self._seen
        super()._negotiate()
        if self._seen == seen:
            return
        for q in self.modules:
            if q not in self.syncs:
                self._synchronize(q, self._rows[q])
        self._synchronize_tied()

    def _is_tried(self, stage: int) -> bool:
        return True

    def _try(self, stage: int) -> list[Meta]:
        found = self._rows[stage] = dict[str, float]()

        def note(name: str, arguments: Any, output: Any) -> None:
            width = output.shape[1 if output.dim() == 4 else -1]
            found[name] = output.numel() / width / len(arguments[0])

        with ExitStack() as stack:
            for name, layer in self.modules[stage].named_modules():
                if not refusal(layer):
                    hook = layer.register_forward_hook(lambda _, a, y, n=name: note(n, a, y))
                    stack.callback(hook.remove)
            return super()._try(stage)

    def _synchronize(self, q: int, rows: dict[str, float]) -> None:
        run = self.runs[q]
        group = self._groups.get(frozenset(run.ranks))
        if group is None or run.way == "split":  # parts are no other's, and the rest is alike
            return
        apart = [p for p in self.modules[q].parameters() if id(p) in self.tied and p.requires_grad]
        for parameter in apart:  # they are another's, below
            parameter.requires_grad_(False)
        names = [n for n, p in self.modules[q].named_parameters() if p.requires_grad]
        if names:
            self.syncs[q] = synchronize(
                self.modules[q],
                layout=self.plan.bucket_mb * 2**20,
                choices=self._choices(q, names, rows),
                shares=[run.samples[rank] for rank in sorted(run.ranks)],
                group=group.all,
                own=group.factors,
                dtype=dtype_of(self.plan.grad_dtype),
                summed=True,
            )
        for parameter in apart:
            parameter.requires_grad_(True)

    def _choices(self, q: int, names: Sequence[str], rows: Mapping[str, float]) -> dict[str, str]:
        """How the ranks of a run agree on each parameter; `rows`: of each linear layer a sample."""
        run = self.runs[q]
        served = [sorted(run.ranks).index(rank) for rank in run.ranks]  # as their group numbers
        ways = {n: f"ps:{served[self.turns[n] % len(served)]}" for n in names if run.way == "ps"}
        ways |= dict.fromkeys(names if run.way == "sharded" else (), "sharded")
        mine = {n: way for n, way in sync_methods(self.plan).items() if n in names}
        if run.way == "factors" and "factors" not in mine.values():
            ways |= _by_factors(self.modules[q], rows, sum(run.samples.values()))
        return ways | {n: _served(way, run) for n, way in mine.items()}

    def _synchronize_tied(self) -> None:
        """Weights of several runs are added up when the last of these is done."""
        for number, q in enumerate(sorted({where[0] for where in self.tied.values()}), 1):
            group = self._groups.get(frozenset(self.runs[q].ranks))
            if q not in self.modules or group is None or -number in self.syncs:
                continue
            each = self.modules[q].parameters()
            mine = [p for p in each if self.tied.get(id(p), [-1])[0] == q and p.requires_grad]
            held = torch.nn.ParameterList(mine)
            word = {"ps": "ps:0", "sharded": "sharded"}.get(self.runs[q].way, "all-reduce")
            choices = {name: word for name, _ in held.named_parameters()}
            made = synchronize(held, choices=choices, group=group.all, summed=True)
            if made.buckets is not None:
                made.buckets.is_syncing = False
            self.syncs[-number] = made

    def _share_buffers(self) -> None:
        """Running statistics are those of one rank of a run, on all of them."""
        for q, module in sorted(self.modules.items()):
            group = self._groups.get(frozenset(self.runs[q].ranks))
            if group is not None:
                send_buffers(module, group.all)


class Pair(NamedTuple):
    """The process groups of one set of ranks."""

    all: Any
    factors: Any  # their own, so that they may overtake buckets
    split: Any  # that of layers which are split over them


def _served(way: str, run: LayerGroup) -> str:
    """A way with its server as the group numbers it; plans count a run's ranks in their order."""
    word, _, rank = way.partition(":")
    if not rank:
        return way
    if not (rank.isdecimal() and int(rank) < len(run.ranks)):
        raise InputError(
            f"`{way}` on the {len(run.ranks)} ranks of `{run.first}` to `{run.last}`",
            hint=f"write ps:0 to ps:{len(run.ranks) - 1}",
        )
    return f"{word}:{sorted(run.ranks).index(run.ranks[int(rank)])}"


def _by_factors(module: Any, rows: Mapping[str, float], batch: int) -> dict[str, str]:
    """Layers of a run whose factors are fewer bytes than their gradient (→ search … factors)."""
    found: dict[str, str] = {}
    for name, layer in module.named_modules():
        trained = all(p.requires_grad for p in layer.parameters())
        if name not in rows or refusal(layer) or not trained:
            continue
        out, width = layer.weight.shape[0], layer.weight[0].numel()
        if rows[name] * batch * (width + out) < 2 * width * out:
            found |= {f"{name}.{p}": "factors" for p, _ in layer.named_parameters()}
    return found


def tied(pieces: Sequence[Any], groups: Sequence[LayerGroup]) -> dict[int, list[int]]:
    """Parameters that several runs hold: the runs of each, by the id of the parameter.

    All ranks ask, those without a run too, so that they refuse together.
    """
    held: dict[int, list[int]] = {}
    for q, piece in enumerate(pieces):
        for parameter in piece.parameters():
            held.setdefault(id(parameter), []).append(q)
    found = {key: where for key, where in held.items() if len(where) > 1}
    for where in found.values():
        if len({frozenset(groups[q].ranks) for q in where}) > 1:
            names = " and ".join(f"`{groups[q].first}`" for q in where)
            raise InputError(
                f"the runs of {names} share a parameter and have other ranks each",
                hint="put layers with tied weights on the same ranks",
            )
        for run in (groups[q] for q in where if groups[q].way == "split"):
            raise InputError(
                f"`{run.first}` to `{run.last}` is split and shares a parameter with another run",
                hint="let layers with tied weights be in one run",
            )
    return found


def turns(pieces: Sequence[Any]) -> dict[str, int]:
    """Layers with parameters take turns in being served: the number of each parameter's layer."""
    named = ((n, dict(m.named_parameters())) for one in pieces for n, m in layers(one).items())
    filled = [(name, own) for name, own in named if own]
    return {f"{name}.{p}": k for k, (name, own) in enumerate(filled) for p in own}
