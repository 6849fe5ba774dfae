"""Data parallel with buckets of one's own: gradients leave in any grouping, order and number of
parts, while the backward still runs.

    gradient of p = Σ_r w_r · (gradient of p on rank r)          w_r: the rank's share of the batch

With equal shares w_r = 1/n this is what DistributedDataParallel gives: bitwise where the order of
a sum does not matter (two ranks), else to the last digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from foretell.errors import InputError
from foretell.pytorch.deploy.layout import Layout

Tensor = Any
Group = Any


class Buckets:
    """Reduces gradients as a layout says; `finish` before the optimizer reads them."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        layout: Layout,
        *,
        weight: float,
        group: Group = None,
        unused: bool = False,  # parameters may get no gradient in a step
        dtype: Any = None,  # in which gradients travel and are added up; their own
    ) -> None:
        layout.check(list(parameters))
        self.layout, self.weight, self.group, self.unused = layout, weight, group, unused
        self.is_syncing = True
        self._buckets = [
            _Bucket({n: parameters[n] for n in names}, dtype) for names in layout.buckets
        ]
        self._of = {n: i for i, names in enumerate(layout.buckets) for n in names}
        self._names = {id(p): n for n, p in parameters.items()}
        self._begin()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._ready) for p in parameters.values()
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank: nothing is sent for the backwards inside."""
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    def flush(self) -> None:
        """Send what has not left yet, where all gradients are there."""
        if all(b.parameters[n].grad is not None for b in self._buckets for n in b.missing):
            self._launch(upto=len(self.layout.order))

    def finish(self) -> None:
        """Send what has not left yet, wait for everything, and hand the gradients out."""
        used = self._all_sent()
        for bucket in self._buckets:
            bucket.hand_out(used)
        self._begin()

    def finish_by_message(self, update: Callable[[], Any]) -> None:
        """Update the parameters of each bucket as soon as it is through, while others travel."""
        used = self._all_sent()
        for bucket in self._buckets:  # an optimizer leaves out what has no gradient
            bucket.hold_back()
        for index in self.layout.order:
            self._buckets[index].hand_out(used)
            update()
            self._buckets[index].hold_back()
        for bucket in self._buckets:
            bucket.hand_out(used)
        self._begin()

    def _all_sent(self) -> dict[str, bool]:
        """Send what has not left yet; which parameters were used, where that is not known."""
        missing = [n for b in self._buckets for n in b.missing if b.parameters[n].grad is None]
        if missing and not self.unused:
            self._begin()
            raise InputError(
                f"no gradient reached {', '.join(f'`{n}`' for n in missing[:6])} in this step",
                hint="deploy with `unused=True` if parts of the model may go unused",
            )
        self._launch(upto=len(self.layout.order))
        return self._used() if self.unused else {}

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def gave(self, name: str, gradient: Tensor) -> None:
        """Take a gradient in the middle of a backward, before autograd has written it."""
        if not self.is_syncing:
            return
        bucket = self._buckets[self._of[name]]
        before = bucket.parameters[name].grad
        bucket.take(name, self.weight, gradient if before is None else before + gradient)
        self._given.add(name)
        self._send_full()

    def _begin(self) -> None:
        self._next = 0
        self._given: set[str] = set()  # taken already when autograd comes to write them
        for bucket in self._buckets:
            bucket.begin()

    def _ready(self, parameter: Tensor) -> None:
        name = self._names[id(parameter)]
        if not self.is_syncing:
            return
        bucket = self._buckets[self._of[name]]
        if name not in self._given:
            bucket.take(name, self.weight)
        bucket.keep_only(name)
        self._send_full()

    def _send_full(self) -> None:
        """Send the buckets whose gradients are all there, as far as the order allows."""
        ahead = self._next
        while ahead < len(self.layout.order) and self._is_full(ahead):
            ahead += 1
        self._launch(upto=ahead)

    def _is_full(self, place: int) -> bool:
        return not self._buckets[self.layout.order[place]].missing

    def _launch(self, upto: int) -> None:
        """Send the buckets up to this place in the order: the same order on every rank."""
        while self._next < upto:
            index = self.layout.order[self._next]
            self._buckets[index].send(self.layout.parts[index], self.group, self.weight)
            self._next += 1

    def _used(self) -> dict[str, bool]:
        """Which parameters got a gradient on any rank."""
        names = list(self._of)
        flags = [float(n not in self._buckets[self._of[n]].absent) for n in names]
        sums = torch.tensor(flags, device=self._buckets[0].flat.device)
        dist.all_reduce(sums, group=self.group)
        return {n: bool(s > 0) for n, s in zip(names, sums.tolist(), strict=True)}


class _Bucket:
    """One flat buffer, a slot in it for each parameter."""

    def __init__(self, parameters: Mapping[str, Tensor], dtype: Any) -> None:
        kinds = {(p.dtype, p.device) for p in parameters.values()}
        if len(kinds) > 1:
            raise InputError(
                f"the bucket of {', '.join(f'`{n}`' for n in parameters)} mixes "
                + ", ".join(sorted(f"{d} on {where}" for d, where in kinds)),
                hint="put parameters of one dtype and device together",
            )
        ((own, device),) = kinds
        held = {n: _local(p) for n, p in parameters.items()}
        sizes = [p.numel() for p in held.values()]
        self.parameters = dict(parameters)
        self.flat = torch.zeros(sum(sizes), dtype=dtype or own, device=device)
        cut = self.flat.split(sizes)
        pairs = zip(held.items(), cut, strict=True)
        self.slots = {n: slot.view_as(p) for (n, p), slot in pairs}
        self.begin()

    def begin(self) -> None:
        self.missing = dict.fromkeys(self.parameters)
        self.absent: set[str] = set()
        self.works: list[Any] = []

    def take(self, name: str, weight: float, gradient: Tensor = None) -> None:
        grad = _local(self.parameters[name].grad if gradient is None else gradient)
        slot = self.slots[name]
        if grad.dtype == slot.dtype:
            torch.mul(grad, weight, out=slot)
        else:
            slot.copy_(grad * weight)
        self.missing.pop(name, None)

    def keep_only(self, name: str) -> None:
        """Let the slot be the gradient, so that the memory of the other serves the next layer's.

        Fresh memory for every gradient of a step is a page fault for each 4 KiB of it.
        """
        parameter, slot = self.parameters[name], self.slots[name]
        if type(parameter.grad) is type(slot) and parameter.grad.dtype == slot.dtype:
            parameter.grad = slot

    def send(self, parts: int, group: Group, weight: float) -> None:
        for name in list(self.missing):  # unused in the last backward, maybe not in those before
            if self.parameters[name].grad is None:
                self.slots[name].zero_()
                self.absent.add(name)
            else:
                self.take(name, weight)
        for part in self.flat.tensor_split(min(parts, self.flat.numel()) or 1):
            self.works.append(dist.all_reduce(part, group=group, async_op=True))

    def hold_back(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def hand_out(self, used: Mapping[str, bool]) -> None:
        for work in self.works:
            work.wait()
        self.works = []
        for name, parameter in self.parameters.items():
            if used.get(name, True):
                parameter.grad = _like(self.slots[name], parameter)


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this rank: all of it, unless it is a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _like(slot: Tensor, parameter: Tensor) -> Tensor:
    """A gradient of the parameter's own kind."""
    grad = slot if slot.dtype == parameter.dtype else slot.to(parameter.dtype)
    if not hasattr(parameter, "to_local"):
        return grad
    where, how = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return type(parameter.data).from_local(
        grad, where, how, run_check=False, shape=shape, stride=stride
    )


def broadcast_state(model: Any, group: Group = None, ranks: Sequence[int] | None = None) -> None:
    """Give every rank the parameters and buffers of the first."""
    first = (ranks or [0])[0]
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(_local(tensor.detach()), src=first, group=group)


def share_buffers(model: Any, group: Group = None, ranks: Sequence[int] | None = None) -> Any:
    """Before each forward in training, give every rank the buffers of the first, as DDP does."""
    hook = partial(_send_buffers, group=group, first=(ranks or [0])[0])
    return model.register_forward_pre_hook(hook) if any(True for _ in model.buffers()) else None


def _send_buffers(model: Any, _: Any, *, group: Group, first: int) -> None:
    if model.training and torch.is_grad_enabled():
        for buffer in model.buffers():
            dist.broadcast(buffer.detach(), src=first, group=group)
