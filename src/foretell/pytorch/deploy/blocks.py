"""Pipelines that torch's runtime cannot hold: stages on several ranks, two directions, branches.

A thin executor over point-to-point messages. Each rank walks its list of actions: it waits for
what an action needs, computes, and sends on what others need. A stage that several stages follow
gets the sum of their gradients; one that follows several gets their outputs as its arguments; one
on several ranks is called on all of them with the same arguments and must give all of them the
same output. Separate pipelines (two directions) take micro-batches in turn, and stages with the
same parameters add up their gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from foretell.errors import InputError
from foretell.pytorch.deploy.actions import Action, Pipeline, Ran
from foretell.pytorch.deploy.messages import Message, Meta, Post, outgoing

Tensor = Any
Kept = tuple[list[Tensor], list[Tensor]]  # arguments, outputs (a loss at the end of a pipeline)


class Blocks:
    """A pipeline of any shape; `step` leaves the gradients of the whole batch."""

    def __init__(
        self,
        pipeline: Pipeline,
        modules: Mapping[int, Any],  # the stages of this rank
        loss: Callable[[Any, Any], Any],
        *,
        group: Any = None,
        device: Any = None,
    ) -> None:
        self.pipeline, self.modules, self.loss = pipeline, dict(modules), loss
        self.group, self.device = group, device or torch.device("cpu")
        self.rank = dist.get_rank(group)
        self.ran: list[Ran] = []
        self.parts = pipeline.micro_batches * len(set(pipeline.lines))
        self._seen: Any = None
        self._metas: dict[int, list[Meta]] = {}
        self._check()
        self._copies = _copy_groups(pipeline, group)

    def step(self, inputs: tuple[Any, ...], target: Any) -> Any:
        """Run every micro-batch there and back; the mean loss on ranks that have one, else None.

        Every rank is given the whole batch and takes what its stages read.
        """
        self.ran.clear()
        chunks = [x.chunk(self.parts) for x in inputs]
        self._batch = [list(c) for c in zip(*chunks, strict=True)]
        self._targets = target.chunk(self.parts)
        if len(self._batch) != self.parts or len({len(b[0]) for b in self._batch}) > 1:
            raise InputError(
                f"a batch of {len(inputs[0])} does not make {self.parts} equal micro-batches"
            )
        self._negotiate()
        self._losses: list[Tensor] = []
        self._begin()
        for action in self.pipeline.orders[self.rank]:
            self._run(action)
        self._post.finish()
        self._add_copies()
        return torch.stack(self._losses).sum() if self._losses else None

    def _begin(self) -> None:
        self._post = Post(self.pipeline, self._metas, self.group, self.device)
        self._outputs: dict[tuple[int, int], list[Tensor]] = {}  # of stages, for ranks like mine
        self._grads: dict[tuple[int, int, int], list[Tensor]] = {}
        self._kept: dict[tuple[int, int], Kept] = {}
        self._weights: dict[tuple[int, int], Any] = {}

    def _run(self, action: Action) -> None:
        """Wait, compute, send."""
        work: dict[str, Callable[..., Any]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input,
            "W": self._weight,
        }
        ready = self._gather(action)
        start = time.monotonic()
        made = work[action.kind](action, ready)
        self.ran.append(Ran(str(action), start, time.monotonic()))
        for to, message in outgoing(self.pipeline, self.rank, action):
            self._post.send(to, made if message.kind == "F" else made[message.stage])

    def _gather(self, action: Action) -> list[Tensor]:
        """The arguments of a forward, or the gradients of a backward's outputs."""
        stage, kind, m = action
        if kind == "F":
            return self._arguments(stage, m)
        if kind == "W" or not self.pipeline.followers[stage]:
            return []
        each = [self._gradient(stage, f, m) for f in self.pipeline.followers[stage]]
        return [sum(grads[1:], start=grads[0]) for grads in zip(*each, strict=True)]

    def _arguments(self, stage: int, m: int) -> list[Tensor]:
        befores = self.pipeline.after[stage]
        if not befores:
            return self._source(stage, m)
        found = []
        for before in befores:
            if (before, m) not in self._outputs:
                self._outputs[before, m] = self._post.receive(Message("F", before, -1, m))
            for tensor, meta in zip(self._outputs[before, m], self._metas[before], strict=True):
                found.append(tensor.detach().requires_grad_(meta.has_grad))
        return found

    def _source(self, stage: int, m: int) -> list[Tensor]:
        """What a first stage reads: all inputs, or its own where several stages are first."""
        lines = self.pipeline.lines
        firsts = [
            s for s, a in enumerate(self.pipeline.after) if not a and lines[s] == lines[stage]
        ]
        batch = self._batch[self._chunk(stage, m)]
        return batch if len(firsts) == 1 else [batch[firsts.index(stage)]]

    def _chunk(self, stage: int, m: int) -> int:
        lines = self.pipeline.lines
        return m * len(set(lines)) + lines[stage]

    def _gradient(self, stage: int, follower: int, m: int) -> list[Tensor]:
        here = self._grads.pop((stage, follower, m), None)
        return self._post.receive(Message("B", stage, follower, m)) if here is None else here

    def _forward(self, action: Action, arguments: list[Tensor]) -> list[Tensor]:
        stage, _, m = action
        outputs = _listed(self.modules[stage](*arguments))
        if not self.pipeline.followers[stage]:
            loss = self.loss(_alone(outputs), self._targets[self._chunk(stage, m)]) / self.parts
            self._losses.append(loss.detach())
            outputs = [loss]
        self._kept[stage, m] = (arguments, outputs)
        if set(self.pipeline.followers[stage]) & set(self.modules):
            self._outputs[stage, m] = outputs
        return outputs

    def _backward(self, action: Action, grads: list[Tensor]) -> dict[int, list[Tensor]]:
        stage, _, m = action
        arguments, outputs = self._kept.pop((stage, m))
        _differentiate(outputs, grads)
        return self._routed(stage, m, [x.grad for x in arguments if x.requires_grad])

    def _input(self, action: Action, grads: list[Tensor]) -> dict[int, list[Tensor]]:
        """The gradient of the arguments; where they need none, all is left to W."""
        stage, _, m = action
        arguments, outputs = self._kept.pop((stage, m))
        wanted = [x for x in arguments if x.requires_grad]
        if not wanted:
            self._weights[stage, m] = (outputs, grads)
            return {}
        tops = [y for y in outputs if y.requires_grad]
        weights = self.modules[stage].parameters()
        found, groups = stage_backward_input(tops, grads or None, wanted, weights)
        self._weights[stage, m] = groups
        return self._routed(stage, m, list(found))

    def _weight(self, action: Action, _: list[Tensor]) -> dict[int, list[Tensor]]:
        stage, _kind, m = action
        left = self._weights.pop((stage, m))
        if isinstance(left, tuple):
            _differentiate(*left)
        else:
            stage_backward_weight(self.modules[stage].parameters(), left)
        return {}

    def _routed(self, stage: int, m: int, grads: list[Tensor]) -> dict[int, list[Tensor]]:
        """Gradients by the stage whose output they are of; those of this rank are kept."""
        found, left = {}, list(grads)
        for before in self.pipeline.after[stage]:
            metas = [meta for meta in self._metas[before] if meta.has_grad]
            mine, left = left[: len(metas)], left[len(metas) :]
            found[before] = [
                meta.empty(self.device).zero_() if g is None else g
                for meta, g in zip(metas, mine, strict=True)
            ]
            if before in self.modules:
                self._grads[before, stage, m] = found[before]
        return found

    def _negotiate(self) -> None:
        """Learn what every stage puts out by running each once; again if the batch changes."""
        seen = [(tuple(x.shape), x.dtype) for x in self._batch[0]]
        if seen == self._seen:
            return
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        for stage in range(self.pipeline.num_stages):
            metas = self._try(stage) if stage in self.modules else []
            box = [metas]
            dist.broadcast_object_list(
                box, src=ranks[self.pipeline.ranks[stage][0]], group=self.group
            )
            self._metas[stage] = box[0]
        self._seen = seen

    def _try(self, stage: int) -> list[Meta]:
        module = self.modules[stage]
        buffers = {n: b.clone() for n, b in module.named_buffers()}
        if self.pipeline.after[stage]:
            arguments = [
                meta.empty(self.device).zero_().requires_grad_(meta.has_grad)
                for before in self.pipeline.after[stage]
                for meta in self._metas[before]
            ]
        else:
            arguments = self._source(stage, 0)
        with torch.random.fork_rng(devices=[]):
            outputs = _listed(module(*arguments))
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
        return [Meta(tuple(y.shape), y.dtype, y.requires_grad) for y in outputs]

    def _check(self) -> None:
        missing = set(self.pipeline.on(self.rank)) ^ set(self.modules)
        if missing:
            raise InputError(
                f"rank {self.rank} runs stages {self.pipeline.on(self.rank)} "
                f"and was given modules for {sorted(self.modules)}"
            )

    def _add_copies(self) -> None:
        """Sum the gradients of stages that hold the same parameters on several ranks."""
        for group, stages in self._copies:
            mine = {id(self.modules[s]): self.modules[s] for s in stages if s in self.modules}
            for module in mine.values():
                for parameter in module.parameters():
                    if parameter.requires_grad:
                        if parameter.grad is None:
                            parameter.grad = torch.zeros_like(parameter)
                        dist.all_reduce(parameter.grad, group=group)


def _copy_groups(pipeline: Pipeline, group: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """A process group for the ranks of each set of copies that this rank is in."""
    found = []
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    for stages in pipeline.copies:
        held = [pipeline.ranks[s] for s in stages]
        if any(len(h) > 1 for h in held):
            raise InputError(f"stages {list(stages)} are copies and on several ranks each")
        each = sorted({r for h in held for r in h})
        if len(each) > 1 and dist.get_rank(group) in each:
            made = dist.new_group([ranks[r] for r in each], use_local_synchronization=True)
            found.append((made, stages))
    return found


def _differentiate(outputs: list[Tensor], grads: list[Tensor]) -> None:
    tops = [y for y in outputs if y.requires_grad]
    torch.autograd.backward(tops, grads or None)


def _listed(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def _alone(outputs: list[Tensor]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
