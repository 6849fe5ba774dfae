"""Layers on ranks of their own: each rank runs the runs of layers it holds, on its own samples.

Between two runs the activations of a micro-batch are cut where the samples of ranks begin and end,
and each part goes to the rank that has it next (→ foretell.plan.group_graph); gradients go the
same way back. Both ends know the order of messages from the plan, so only shapes are negotiated,
once. A run that is split has all samples on each of its ranks, and parts of its layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.plan.check import agreed, micro_batches_of_groups, run_samples, runs
from foretell.plan.group_graph import Action, Move, edges, handed, orders
from foretell.pytorch.deploy.actions import Ran
from foretell.pytorch.deploy.batch_norm import norms, synchronize_norms
from foretell.pytorch.deploy.channels import Part, split_all, split_parameters, whole_state
from foretell.pytorch.deploy.collective import new_groups
from foretell.pytorch.deploy.group_sync import (
    Syncs,
    groups_of,
    rows_of,
    synced,
    synced_late,
    tied,
    turns,
)
from foretell.pytorch.deploy.mesh import found_by_first
from foretell.pytorch.deploy.messages import Meta, Post, differentiate, listed, tried
from foretell.pytorch.deploy.precision import dtype_of, unscaled

Tensor = Any
_CUT = "runs can be cut only where tensors with a row for each sample pass"


class BoundaryMessage(NamedTuple):
    """Samples of a run's output on their way on, or of its gradient on the way back."""

    kind: str  # F or B
    run: int  # whose output it is
    micro_batch: int
    first: int
    last: int


class Groups:
    """The runs of this rank; `step` leaves the gradients of the whole batch."""

    def __init__(
        self, plan: Plan, pieces: Sequence[Any], loss: Callable[[Any, Any], Any], device: Any
    ) -> None:
        self.plan, self.loss, self.device, self.rank = plan, loss, device, dist.get_rank()
        self.runs, self.batches = runs(plan), micro_batches_of_groups(plan)
        self.batch = self.runs[0].batch
        self.is_split = [run.way == "split" for run in self.runs]
        self.modules = {q: pieces[q] for q, run in enumerate(self.runs) if self.rank in run.samples}
        self.dealt = [run_samples(run, self.batches) for run in self.runs]
        wide = {q for q, is_split in enumerate(self.is_split) if is_split}
        self.orders = orders([run.ranks for run in self.runs], self.batches, wide)
        self.moves, self.steps = cache(self._moves), 0
        self.tied, self.turns = tied(pieces, self.runs), turns(pieces)
        self.sync, self.ran = Syncs(), list[Ran]()
        self.scale: Callable[[], float] = unscaled  # of losses, for gradients in fp16
        self._groups = groups_of(self.runs)
        self.parts = {q: self._split(q) for q in self.modules if self.is_split[q]}
        self.splits: dict[int, Any] = {}  # by id of a parameter: dim, sizes, group
        for q, parts in self.parts.items():
            group = self._groups[frozenset(self.runs[q].ranks)].split
            pairs = split_parameters(self.modules[q], parts, group)
            self.splits |= {id(p): how for p, how in pairs}
        self._metas: list[list[Meta]] = []
        self._seen: Any = None

    @property
    def share(self) -> float:
        """By what this rank's mean loss counts; nothing where it has none."""
        return float(self.runs[-1].samples.get(self.rank, 0))

    def step(self, inputs: tuple[Any, ...], target: Any) -> Any:
        """Run every micro-batch there and back; the mean loss on ranks of the last run, else None.

        Every rank is given the whole batch and takes the samples that are its own.
        """
        if len(inputs[0]) != self.batch:
            raise InputError(
                f"a batch of {len(inputs[0])} samples for a plan of {self.batch}",
                hint="every rank gives `step` the whole batch, and takes its own samples itself",
            )
        self._negotiate(inputs)
        self.ran.clear()
        self.steps += 1
        self._inputs, self._target = inputs, target
        self._losses: list[Tensor] = []
        self._made: dict[tuple[str, int, int], list[Tensor]] = {}  # for runs on this rank too
        self._kept: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._post = Post(self._expected(), self._empties, None)
        for act in self.orders.get(self.rank, ()):
            start = time.monotonic()
            (self._forward if act.kind == "F" else self._backward)(act)
            self.ran.append(Ran(str(act), start, time.monotonic()))
        self._post.finish()
        self._share_buffers()
        return torch.stack(self._losses).sum() * self.batch / self.share if self._losses else None

    def whole_state(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank's runs, parts put together; asked on all at once."""
        found: dict[str, Tensor] = {}
        for q, module in sorted(self.modules.items()):
            group = self._groups.get(frozenset(self.runs[q].ranks))
            found |= whole_state(module, self.parts.get(q, {}), group and group.split)
        return found

    def close(self) -> None:
        """Let the process groups of its runs go; no step can be taken after it."""
        for pair in self._groups.values():
            for group in filter(None, pair):
                dist.destroy_process_group(group)
        self._groups = {}

    def synchronize_norms(self) -> None:
        """Let batch norms of a run see the samples of all its ranks."""
        mine = {q: norms(m) for q, m in sorted(self.modules.items()) if not self.is_split[q]}
        mine = {q: names for q, names in mine.items() if names and len(self.runs[q].ranks) > 1}
        groups = new_groups(self.runs[q].ranks for q in mine)
        for q, names in mine.items():
            if not all(n for micro in self.dealt[q] for n in micro.values()):
                raise InputError(
                    f"`{names[0]}` needs the statistics of all ranks, and some of its run have no "
                    "sample of a micro-batch",
                    hint="take a larger micro_batch, or batch_norm=local",
                )
            synchronize_norms(self.modules[q], groups[tuple(self.runs[q].ranks)])

    # Who has what

    def _moves(self, kind: str, run: int, m: int) -> list[Move]:
        """What of a run's output goes to the next (F), or of its gradient comes back (B)."""
        a, b = (run, run + 1) if kind == "F" else (run + 1, run)
        return handed(
            self.dealt[a][m], self.dealt[b][m], from_all=self.is_split[a], to_all=self.is_split[b]
        )

    def _outgoing(self, rank: int, act: Action) -> list[tuple[int, BoundaryMessage]]:
        """What a rank sends after it has done something, and to whom."""
        kind, q, m = act
        run = q if kind == "F" else q - 1  # whose output it is about
        there = self.moves(kind, run, m) if 0 <= run < len(self.runs) - 1 else []
        return [(x.target, BoundaryMessage(kind, run, m, x.first, x.last))
                for x in there if x.source == rank != x.target]  # fmt: skip

    def _expected(self) -> dict[int, list[BoundaryMessage]]:
        """What comes from each of the others, in the order in which it comes."""
        found: dict[int, list[BoundaryMessage]] = {}
        for source, order in self.orders.items():
            for act in order:
                mine = [h for to, h in self._outgoing(source, act) if to == self.rank]
                if mine:
                    found.setdefault(source, []).extend(mine)
        return found

    def _empties(self, handed: BoundaryMessage) -> list[Tensor]:
        metas = [m for m in self._metas[handed.run] if m.has_grad or handed.kind == "F"]
        rows = handed.last - handed.first
        return [m._replace(shape=(rows, *m.shape)).empty(self.device) for m in metas]

    def _begins(self, run: int, m: int) -> int:
        """Where this rank's samples of a micro-batch begin."""
        if self.is_split[run]:
            return 0
        place = self.runs[run].ranks.index(self.rank)
        return edges([*self.dealt[run][m].values()])[place]

    # What is done

    def _forward(self, act: Action) -> None:
        _, q, m = act
        if not self.dealt[q][m][self.rank]:
            return
        arguments = self._arguments(q, m)
        with self._drawing(q, m):
            outputs = listed(self.modules[q](*arguments))
        if q + 1 == len(self.runs):
            outputs = [self._weighed(outputs, m)]
        else:
            _check_rows(outputs, self.dealt[q][m][self.rank], self.runs[q].last)
        self._kept[q, m] = (arguments, outputs)
        if q + 1 in self.modules:
            self._made["F", q, m] = outputs
        self._send(act, q, outputs)

    def _arguments(self, q: int, m: int) -> list[Tensor]:
        """The samples of this rank, from wherever they are."""
        if q == 0:
            return [x[self._own(q, m)] for x in self._inputs]
        parts = self._parts("F", q - 1, m)
        metas = self._metas[q - 1]
        return [x.requires_grad_(meta.has_grad) for x, meta in zip(parts, metas, strict=True)]

    def _own(self, q: int, m: int) -> slice:
        """This rank's samples of a micro-batch, counted in the whole batch."""
        first = m * self.batch // self.batches + self._begins(q, m)
        return slice(first, first + self.dealt[q][m][self.rank])

    def _weighed(self, outputs: list[Tensor], m: int) -> Tensor:
        """The loss of some samples as their part of the mean over the batch."""
        last = len(self.runs) - 1
        target = None if self._target is None else self._target[self._own(last, m)]
        alone = outputs[0] if len(outputs) == 1 else tuple(outputs)
        part = self.loss(alone, target) * (self.dealt[last][m][self.rank] / self.batch)
        self._losses.append(part.detach())
        return part * self.scale()

    def _backward(self, act: Action) -> None:
        _, q, m = act
        is_last = m + 1 == self.batches
        if self.dealt[q][m][self.rank]:
            is_late = not all(self.dealt[q][-1].values())
            self.sync.listen(q, is_last=is_last, is_late=is_late)
            arguments, outputs = self._kept.pop((q, m))
            if any(y.requires_grad for y in outputs):
                differentiate(outputs, self._gradients(q, m))
            if q:
                grads = [_gradient(x) for x in arguments if x.requires_grad]
                if q - 1 in self.modules:
                    self._made["B", q - 1, m] = grads
                self._send(act, q, grads)
        if is_last:
            self.sync.begin(q)

    def _gradients(self, q: int, m: int) -> list[Tensor]:
        """The gradients of a run's outputs, from their readers."""
        if q + 1 == len(self.runs):
            return []
        return self._parts("B", q, m)

    def _parts(self, kind: str, run: int, m: int) -> list[Tensor]:
        """Stretches from other ranks and from this one, put together in order."""
        found = []
        for move in (x for x in self.moves(kind, run, m) if x.target == self.rank):
            if move.source == self.rank:
                first = self._begins(run if kind == "F" else run + 1, m)
                cut = slice(move.first - first, move.last - first)
                found.append([y.detach()[cut] for y in self._made[kind, run, m]])
            else:
                found.append(
                    self._post.receive(BoundaryMessage(kind, run, m, move.first, move.last))
                )
        self._made.pop((kind, run, m), None)
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _send(self, act: Action, q: int, tensors: list[Tensor]) -> None:
        first = self._begins(q, act.micro_batch)
        for to, message in self._outgoing(self.rank, act):
            cut = slice(message.first - first, message.last - first)
            self._post.send(to, [y[cut] for y in tensors])

    @contextmanager
    def _drawing(self, q: int, m: int) -> Iterator[None]:
        """Ranks that a run is split over draw the same numbers, whatever they drew before."""
        if not self.is_split[q]:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed((self.steps * len(self.runs) + q) * self.batches + m)
            yield

    # Once

    def _split(self, q: int) -> dict[str, Part]:
        """Keep this rank's part of each layer of a run."""
        if any(id(p) in self.tied for p in self.modules[q].parameters()):
            run = self.runs[q]
            raise InputError(
                f"`{run.first}` to `{run.last}` is split and shares a parameter with another run",
                hint="let layers with tied weights be in one run",
            )
        return split_all(self.modules[q], self._groups[frozenset(self.runs[q].ranks)].split)

    def _negotiate(self, inputs: tuple[Any, ...]) -> None:
        """Learn what every run puts out by running each once; again if the batch changes."""
        seen = [(tuple(x.shape), x.dtype) for x in inputs]
        if seen == self._seen:
            return
        self._seen, self._metas = seen, []
        few = min(2, self.batch)
        arguments = [x[:few] for x in inputs]
        for q, run in enumerate(self.runs):
            trying = run.ranks if self.is_split[q] else run.ranks[:1]
            metas, rows = found_by_first(trying, partial(self._try, q, arguments), _CUT)
            self._metas.append(metas)
            arguments = [
                m._replace(shape=(few, *m.shape)).empty(self.device).zero_() for m in metas
            ]
            if q in self.modules and q not in self.sync.parts:
                self._synchronize(q, rows)
        self._synchronize_tied()

    def _try(self, q: int, arguments: list[Tensor]) -> tuple[list[Meta], dict[str, float]]:
        rows, hooks = rows_of(self.modules[q])
        before = self._metas[q - 1] if q else [None] * len(arguments)
        given = [
            x.requires_grad_(meta is not None and meta.has_grad)
            for x, meta in zip(arguments, before, strict=True)
        ]
        outputs = tried(self.modules[q], given)
        for hook in hooks:
            hook.remove()
        if q + 1 < len(self.runs):
            _check_rows(outputs, len(arguments[0]), self.runs[q].last)
        return [Meta(tuple(y.shape[1:]), y.dtype, y.requires_grad) for y in outputs], rows

    def _synchronize(self, q: int, rows: dict[str, float]) -> None:
        run = self.runs[q]
        group = self._groups.get(frozenset(run.ranks))
        if group is None or run.way == "split":  # parts are no other's, and the rest is alike
            return
        apart = [p for p in self.modules[q].parameters() if id(p) in self.tied and p.requires_grad]
        for parameter in apart:  # they are another's, below
            parameter.requires_grad_(False)
        made = synced(
            run, self.modules[q], group, given=agreed(self.plan), turns=self.turns, rows=rows,
            bucket_bytes=self.plan.bucket_mb * 2**20, dtype=dtype_of(self.plan.grad_dtype),
        )  # fmt: skip
        for parameter in apart:
            parameter.requires_grad_(True)
        if made is not None:
            self.sync.parts[q] = made

    def _synchronize_tied(self) -> None:
        """Weights of several runs are added up when the last of these is done."""
        for number, q in enumerate(sorted({where[0] for where in self.tied.values()}), 1):
            group = self._groups.get(frozenset(self.runs[q].ranks))
            if q not in self.modules or group is None or -number in self.sync.parts:
                continue
            mine = [p for p in self.modules[q].parameters() if self.tied.get(id(p), [-1])[0] == q]
            self.sync.parts[-number] = synced_late(mine, self.runs[q].way, group)

    def _share_buffers(self) -> None:
        """Running statistics are those of the first rank of a run, on all of them."""
        for q, module in sorted(self.modules.items()):
            group = self._groups.get(frozenset(self.runs[q].ranks))
            if group is not None:
                for buffer in module.buffers():
                    dist.broadcast(buffer.detach(), src=self.runs[q].ranks[0], group=group.all)


def _check_rows(outputs: list[Tensor], samples: int, layer: str) -> None:
    """Raise where a run sends on what has no row for each sample."""
    for y in outputs:
        if not isinstance(y, torch.Tensor) or y.dim() == 0 or len(y) != samples:
            shape = tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
            raise InputError(f"behind layer `{layer}` {samples} samples have become {shape}")


def _gradient(argument: Tensor) -> Tensor:
    return torch.zeros_like(argument) if argument.grad is None else argument.grad
