"""Pipelines of any shape: lines, stages on several ranks, two directions, branches.

A thin executor over point-to-point messages, for any legal order of F, B, I and W. It takes fewer
core seconds than torch's own runtime, which holds lines of stages alone. Each rank walks its list
of actions: it waits for what an action needs, computes, and sends on what others need. A stage that
several stages follow gets the sum of their gradients; one that follows several gets their outputs
as its arguments; one on several ranks is called on all of them with the same arguments and must
give all of them the same output. Separate pipelines (two directions) take micro-batches in turn,
and parameters that several ranks hold add up their gradients.

What ranks send each other comes in an order both ends know without asking. A stage's output goes to
every rank of the stages that follow it, and the gradient of that output comes back from each of
them; a rank that holds both ends sends nothing. Of a stage on several ranks the first sends for
all. Messages between two ranks travel in the sender's order, and the receiver posts them in that
order, so backends without tags work too. NCCL runs all that two ranks of a group exchange one
after another: there each of the two ways has a group of its own.

A module may say in `reads` which tensors of the batch it takes behind what other stages hand it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from foretell.errors import InputError
from foretell.plan.stage_placement import Action
from foretell.pytorch.deploy.actions import Pipeline, Ran
from foretell.pytorch.deploy.buckets import local
from foretell.pytorch.deploy.collective import Shared, found_by_first, one_more, shared_groups
from foretell.pytorch.deploy.precision import unscaled
from foretell.pytorch.deploy.shard import hold, reduce
from foretell.pytorch.deploy.uses import untouched

Tensor = Any
Kept = tuple[list[Tensor], list[Tensor]]  # arguments, outputs (a loss at the end of a pipeline)
_AHEAD = 1  # receives posted beyond the one that is needed, so that transfers overlap compute


class Blocks:
    """A pipeline of any shape; `step` leaves the gradients of the whole batch."""

    hint = ""  # where a stage puts out what cannot be sent

    def __init__(
        self,
        pipeline: Pipeline,
        modules: Mapping[int, Any],  # the stages of this rank
        loss: Callable[[Any, Any], Any],
        *,
        group: Any = None,
        device: Any = None,
        shared: Shared = (),  # of this rank, in one order on all ranks
        weights: Sequence[float] = (),  # of each micro-batch in the loss; equal
    ) -> None:
        self.pipeline, self.modules, self.loss = pipeline, dict(modules), loss
        self.group, self.device = group, device or torch.device("cpu")
        self.rank = dist.get_rank(group)
        self.back = one_more(group) if self.device.type == "cuda" else group  # to lower ranks
        self.ran: list[Ran] = []
        self.parts = pipeline.micro_batches * len(set(pipeline.lines))
        self.scale: Callable[[], float] = unscaled  # of losses, for gradients in fp16
        self.weights = list(weights) or [1 / self.parts] * self.parts
        self._seen: Any = None
        self._metas: dict[int, list[Meta]] = {}
        self._check()
        self.shared = shared_groups(shared or self._copied(), group)

    def step(self, inputs: tuple[Any, ...], target: Any) -> Any:
        """Run every micro-batch there and back; the mean loss on ranks that have one, else None.

        Every rank is given the whole batch and takes what its stages read.
        """
        self._targets: Any = [None] * self.parts if target is None else self._cut(target)
        self._walk(self.pipeline, inputs)
        for module in {id(m): m for m in self.modules.values()}.values():
            reduce(module)
        for parameter, group in self.shared:  # every copy has the sum of the gradients of all
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local(parameter.grad), group=group)
        losses = [loss for (loss,) in self._ends.values()]
        whole = sum(self.weights[chunk] for chunk in self._ends) * self.scale()
        return torch.stack(losses).sum() / whole if losses else None

    def infer(self, inputs: tuple[Any, ...]) -> dict[int, Any]:
        """What the model gives for each micro-batch, by its place in the batch.

        On ranks that have an end of the pipeline; no gradients, and nothing is kept for them.
        """
        self._targets = None
        with torch.no_grad():
            self._walk(self.pipeline.forward, inputs)
        return {chunk: self._ends[chunk][0] for chunk in sorted(self._ends)}

    def settle(self) -> None:
        """When the gradients of this rank are whole: what is left to add up with others."""

    def attach(self, optimizer: Any) -> None:
        """Do what has to be done around an update: nothing, where all ranks do it alike."""

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates a parameter: not where another does it for all."""
        return True

    def _walk(self, pipeline: Pipeline, inputs: tuple[Any, ...]) -> None:
        """Run this rank's list of actions."""
        self.ran.clear()
        self.prepare(inputs)
        self._begin(pipeline)
        for action in pipeline.orders[self.rank]:
            self._run(action)
        self._post.finish()

    def prepare(self, inputs: tuple[Any, ...]) -> None:
        """Cut a batch into micro-batches; learn from the first what stages send each other."""
        self._require_batch(inputs)
        self._batch = [list(c) for c in zip(*(self._cut(x) for x in inputs), strict=True)]
        self._negotiate()

    def _require_batch(self, inputs: tuple[Any, ...]) -> None:
        if len(inputs[0]) % self.parts:
            raise InputError(
                f"a batch of {len(inputs[0])} does not make {self.parts} equal micro-batches"
            )

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """The micro-batches of a tensor."""
        found: Sequence[Tensor] = tensor.chunk(self.parts)
        return found

    def _begin(self, pipeline: Pipeline) -> None:
        self._ends: dict[int, tuple[Any]] = {}  # losses, or outputs, by micro-batch of the batch
        self._post = Post(self._expected(pipeline), self._empties, (self.group, self.back))
        self._outputs: dict[tuple[int, int], list[Any]] = {}  # readers to come, tensors
        self._grads: dict[tuple[int, int, int], list[Tensor]] = {}
        self._kept: dict[tuple[int, int], Kept] = {}
        self._weights: dict[tuple[int, int], Any] = {}

    def _expected(self, pipeline: Pipeline) -> Mapping[int, Sequence[Any]]:
        """What comes from each of the other ranks, in the order in which it comes."""
        return incoming(pipeline, self.rank)

    def _send(self, action: Action, made: Any) -> None:
        """Send on what others need of an action."""
        for to, message in outgoing(self.pipeline, self.rank, action):
            self._post.send(to, made if message.kind == "F" else made[message.stage])

    def _empties(self, message: Any) -> list[Tensor]:
        metas = self._metas[message.stage]
        return [m.empty(self.device) for m in metas if m.has_grad or message.kind == "F"]

    def _run(self, action: Action) -> None:
        """Wait, compute, send."""
        work: dict[str, Callable[..., Any]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input,
            "W": self._weight,
        }
        ready = self._gather(action)
        if action.kind != "F":
            hold(self.modules[action.stage])
        start = time.monotonic()
        made = work[action.kind](action, ready)
        self.ran.append(Ran(str(action), start, time.monotonic()))
        self._send(action, made)

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
        found = []
        for before in self.pipeline.after[stage]:
            outputs = self._output(before, stage, m)
            for tensor, meta in zip(outputs, self._metas[before], strict=True):
                wants = meta.has_grad and torch.is_grad_enabled()
                found.append(tensor.detach().requires_grad_(wants))
        return found + self._source(stage, m)

    def _output(self, stage: int, follower: int, m: int) -> list[Tensor]:
        """What a stage put out, which is forgotten when its last follower here has read it."""
        if (stage, m) not in self._outputs:
            tensors = self._post.receive(Message("F", stage, -1, m))
            self._outputs[stage, m] = [self._readers(stage), tensors]
        kept = self._outputs[stage, m]
        kept[0] -= 1
        if not kept[0]:
            del self._outputs[stage, m]
        return list(kept[1])

    def _readers(self, stage: int) -> int:
        return len(set(self.pipeline.followers[stage]) & set(self.modules))

    def _source(self, stage: int, m: int) -> list[Tensor]:
        """What a stage reads of the batch: what it asks for, or a first stage its own part."""
        batch = self._batch[self._chunk(stage, m)]
        inputs = getattr(self.modules[stage], "reads", None)
        if inputs is not None:
            return [batch[place] for place in inputs]
        if self.pipeline.after[stage]:
            return []
        lines = self.pipeline.lines
        firsts = [
            s for s, a in enumerate(self.pipeline.after) if not a and lines[s] == lines[stage]
        ]
        return batch if len(firsts) == 1 else [batch[firsts.index(stage)]]

    def _chunk(self, stage: int, m: int) -> int:
        lines = self.pipeline.lines
        return m * len(set(lines)) + lines[stage]

    def _gradient(self, stage: int, follower: int, m: int) -> list[Tensor]:
        here = self._grads.pop((stage, follower, m), None)
        return self._post.receive(Message("B", stage, follower, m)) if here is None else here

    def _forward(self, action: Action, arguments: list[Tensor]) -> list[Tensor]:
        stage, _, m = action
        made = self.modules[stage](*arguments)
        if self.pipeline.halves:
            made = owned(made)
        outputs = listed(made)
        if not self.pipeline.followers[stage]:
            outputs = self._ended(stage, m, made)
        if torch.is_grad_enabled() and stage not in self.pipeline.frozen:
            self._kept[stage, m] = (arguments, outputs)
        if readers := self._readers(stage):
            self._outputs[stage, m] = [readers, outputs]
        return outputs

    def _ended(self, stage: int, m: int, made: Any) -> list[Tensor]:
        """The loss at the end of a pipeline; the output itself where nothing trains."""
        chunk = self._chunk(stage, m)
        if self._targets is None:
            self._ends[chunk] = (made,)
            return []
        loss = self.loss(made, self._target(stage, m)) * (self.weights[chunk] * self.scale())
        self._ends[chunk] = (loss.detach(),)
        return [loss]

    def _target(self, stage: int, m: int) -> Any:
        return self._targets[self._chunk(stage, m)]

    def _backward(self, action: Action, grads: list[Tensor]) -> dict[int, list[Tensor]]:
        stage, _, m = action
        arguments, outputs = self._kept.pop((stage, m))
        differentiate(outputs, grads)
        return self._routed(stage, m, [x.grad for x in arguments if x.requires_grad])

    def _input(self, action: Action, grads: list[Tensor]) -> dict[int, list[Tensor]]:
        """The gradient of the arguments; where they need none, all is left to W."""
        stage, _, m = action
        arguments, outputs = self._kept.pop((stage, m))
        wanted = [x for x in arguments if x.requires_grad]
        if not wanted:
            self._weights[stage, m] = (outputs, grads)
            return self._routed(stage, m, [])
        tops = [y for y in outputs if y.requires_grad]
        weights = self.modules[stage].parameters()
        found, groups = stage_backward_input(tops, grads or None, wanted, weights)
        self._weights[stage, m] = groups
        return self._routed(stage, m, list(found))

    def _weight(self, action: Action, _: list[Tensor]) -> dict[int, list[Tensor]]:
        stage, _kind, m = action
        left = self._weights.pop((stage, m))
        if isinstance(left, tuple):
            differentiate(*left)
        else:
            stage_backward_weight(self.modules[stage].parameters(), joined(left))
        return {}

    def _routed(self, stage: int, m: int, grads: list[Tensor]) -> dict[int, list[Tensor]]:
        """Gradients by the stage whose output they are of; those of this rank are kept."""
        found, left = {}, list(grads)
        for before in self.pipeline.after[stage]:
            metas = [meta for meta in self._metas[before] if meta.has_grad]
            mine, left = left[: len(metas)], left[len(metas) :]
            pairs = zip(metas, mine, strict=True)  # zeros for gradients that nothing made
            found[before] = [self._zeros(stage, m, meta) if g is None else g for meta, g in pairs]
            if before in self.modules:
                self._grads[before, stage, m] = found[before]
        return found

    def _zeros(self, stage: int, m: int, meta: Meta) -> Tensor:
        """Zeros like a tensor that a stage is given."""
        return meta.empty(self.device).zero_()

    def _negotiate(self) -> None:
        """Learn what every stage puts out by running each once; again if the batch changes."""
        seen = [(tuple(x.shape), x.dtype) for x in self._batch[0]]
        if seen == self._seen:
            return
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        for stage, held in enumerate(self.pipeline.ranks):
            found = partial(self._try, stage) if self._is_tried(stage) else list
            there = [ranks[r] for r in held]
            self._metas[stage] = found_by_first(there, found, self.hint, self.group)
        self._seen = seen

    def _is_tried(self, stage: int) -> bool:
        """Whether it has to be known what a stage puts out: others take it."""
        return bool(self.pipeline.followers[stage])

    def _try(self, stage: int) -> list[Meta]:
        given = [
            self._zeros(stage, 0, meta).requires_grad_(meta.has_grad)
            for before in self.pipeline.after[stage]
            for meta in self._metas[before]
        ]
        with torch.enable_grad():
            outputs = tried(self.modules[stage], given + self._source(stage, 0))
        return [self._meta(stage, y) for y in outputs]

    def _meta(self, stage: int, output: Tensor) -> Meta:
        return Meta(tuple(output.shape), output.dtype, output.requires_grad)

    def _check(self) -> None:
        missing = set(self.pipeline.on(self.rank)) ^ set(self.modules)
        if missing:
            raise InputError(
                f"rank {self.rank} runs stages {self.pipeline.on(self.rank)} "
                f"and was given modules for {sorted(self.modules)}"
            )

    def _copied(self) -> Shared:
        """The parameters of stages that are copies of each other, by their place among them."""
        found = []
        for stages in self.pipeline.copies:
            mine = next((s for s in stages if s in self.modules), None)
            each = {self.pipeline.ranks[s] for s in stages}
            if mine is None or len(each) == 1:
                continue
            at = self.pipeline.ranks[mine].index(self.rank)
            ranks = tuple(sorted({held[at] for held in each}))
            found += [(p, ranks) for p in self.modules[mine].parameters()]
        return found


class Message(NamedTuple):
    """A stage's output on its way to a rank, or its gradient on the way back from a follower."""

    kind: str  # F or B
    stage: int  # whose output it is
    follower: int  # whose gradient it is; -1 forward
    micro_batch: int


class Meta(NamedTuple):
    """One tensor that a stage puts out."""

    shape: tuple[int, ...]
    dtype: Any
    has_grad: bool

    def with_rows(self, rows: int) -> Meta:
        """Of so many samples, where the shape is that of one."""
        return self._replace(shape=(rows, *self.shape))

    def empty(self, device: Any) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def tried(module: Any, arguments: Sequence[Tensor]) -> list[Tensor]:
    """What a stage puts out; its buffers and the random numbers are left as they were."""
    try:
        with untouched(module):
            return listed(module(*arguments))
    except ValueError as error:  # of a layer that such a batch is not for
        shapes = ", ".join(str(list(x.shape)) for x in arguments)
        raise InputError(f"a stage cannot be run on a micro-batch of {shapes}: {error}") from None


def listed(outputs: Any) -> list[Tensor]:
    """Whatever a stage gave as a list of tensors."""
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def differentiate(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Backward through a stage, from the gradients of those outputs that have some."""
    tops = [y for y in outputs if y.requires_grad]
    if tops:
        torch.autograd.backward(tops, list(grads) or None)


def owned(output: Any) -> Any:
    """What a stage puts out as tensors that are no views: a backward in two detaches them."""
    if isinstance(output, tuple | list):
        return type(output)(owned(y) for y in output)
    is_view = isinstance(output, torch.Tensor) and output._is_view()
    return output.clone() if is_view else output


def joined(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is left of a backward in two, as torch's `stage_backward_weight` can finish it.

    Torch goes back once for each group of weights and frees the way. Where a weight is used in
    several places, the ways of groups overlap, so all of them are gone in one go.
    """
    if all(len(group["intermediates"]) == 1 for group in groups):
        return [dict(group) for group in groups]
    grads: dict[Any, Any] = {}
    for group in groups:
        grads |= zip(group["intermediates"], group["grads"], strict=True)
    weights = {weight: None for group in groups for weight in group["params"]}
    return [{"params": [*weights], "intermediates": [*grads], "grads": [*grads.values()]}]


def outgoing(pipeline: Pipeline, rank: int, action: Action) -> list[tuple[int, Message]]:
    """What a rank sends after an action, and to which rank."""
    stage, kind, m = action
    if kind == "W" or pipeline.ranks[stage][0] != rank:
        return []
    own = set(pipeline.ranks[stage])
    if kind == "F":
        there = {r for f in pipeline.followers[stage] for r in pipeline.ranks[f]}
        return [(r, Message("F", stage, -1, m)) for r in sorted(there - own)]
    return [
        (r, Message("B", before, stage, m))
        for before in pipeline.after[stage]
        for r in pipeline.ranks[before]
        if r not in own
    ]


def incoming(pipeline: Pipeline, rank: int) -> dict[int, list[Message]]:
    """What comes to a rank from each of the others, in the order in which it comes."""
    found: dict[int, list[Message]] = {}
    for source, order in enumerate(pipeline.orders):
        messages = [m for a in order for r, m in outgoing(pipeline, source, a) if r == rank]
        if messages:
            found[source] = messages
    return found


class Post:
    """Sends and receives for one rank during one step."""

    def __init__(
        self,
        expected: Mapping[int, Sequence[Any]],  # from each rank, in the order in which it sends
        empties: Callable[[Any], list[Tensor]],  # what a message is received into
        groups: tuple[Any, Any],  # of what goes to higher ranks, and to lower ones
    ) -> None:
        self.empties, self.groups = empties, groups
        self.rank = dist.get_rank(groups[0])
        self.ranks = dist.get_process_group_ranks(groups[0] or dist.group.WORLD)
        self.left = {source: deque(messages) for source, messages in expected.items()}
        self.source = {m: s for s, ms in self.left.items() for m in ms}
        self.posted: dict[Any, list[tuple[Any, Tensor]]] = {}
        self.sent: list[tuple[Any, Tensor]] = []

    def send(self, to: int, tensors: list[Tensor]) -> None:
        """Send without waiting; the tensors are kept until `finish`."""
        for tensor in tensors:
            ready, group = tensor.detach().contiguous(), self.groups[to < self.rank]
            self.sent.append((dist.isend(ready, dst=self.ranks[to], group=group), ready))

    def receive(self, message: Hashable) -> list[Tensor]:
        """Wait for a message; those that come before it from the same rank are posted too."""
        source = self.source[message]
        while message not in self.posted:
            self._post(source)
        for _ in range(_AHEAD):
            self._post(source)
        tensors = []
        for work, tensor in self.posted.pop(message):
            work.wait()
            tensors.append(tensor)
        return tensors

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def _post(self, source: int) -> None:
        if not self.left[source]:
            return
        message, group = self.left[source].popleft(), self.groups[self.rank < source]
        self.posted[message] = [
            (dist.irecv(b, src=self.ranks[source], group=group), b) for b in self.empties(message)
        ]
