"""What ranks of a pipeline send each other, in an order both ends know without asking.

A stage's output goes to every rank of the stages that follow it, and the gradient of that output
comes back from each of them; a rank that holds both ends sends nothing. Of a stage on several
ranks the first sends for all. Messages between two ranks travel in the sender's order, and the
receiver posts them in that order, so backends without tags work too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from foretell.plan.stage_placement import Action
from foretell.pytorch.deploy.actions import Pipeline

Tensor = Any
_AHEAD = 1  # receives posted beyond the one that is needed, so that transfers overlap compute


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

    def empty(self, device: Any) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def tried(module: Any, arguments: Sequence[Tensor]) -> list[Tensor]:
    """What a stage puts out; its buffers and the random numbers are left as they were."""
    with untouched(module):
        return listed(module(*arguments))


@contextmanager
def untouched(module: Any) -> Iterator[None]:
    """Put buffers and random numbers back to what they were."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for buffer, old in before:
            buffer.data.copy_(old)  # autograd need not know: what it saved is not these values


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
        group: Any,
    ) -> None:
        self.empties, self.group = empties, group
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.left = {source: deque(messages) for source, messages in expected.items()}
        self.source = {m: s for s, ms in self.left.items() for m in ms}
        self.posted: dict[Any, list[tuple[Any, Tensor]]] = {}
        self.sent: list[tuple[Any, Tensor]] = []

    def send(self, to: int, tensors: list[Tensor]) -> None:
        """Send without waiting; the tensors are kept until `finish`."""
        for tensor in tensors:
            ready = tensor.detach().contiguous()
            self.sent.append((dist.isend(ready, dst=self.ranks[to], group=self.group), ready))

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
        message = self.left[source].popleft()
        self.posted[message] = [
            (dist.irecv(b, src=self.ranks[source], group=self.group), b)
            for b in self.empties(message)
        ]
