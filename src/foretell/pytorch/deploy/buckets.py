"""Data parallel with buckets of one's own: gradients leave in any grouping, order and number of
parts, while the backward still runs.

    gradient of p = Σ_r w_r · (gradient of p on rank r)          w_r: the rank's share of the batch

With equal shares w_r = 1/n this is what DistributedDataParallel gives: bitwise where the order of
a sum does not matter (two ranks), else to the last digits.

A layout says which gradients travel together: buckets by parameter name, and their parts. It covers
every parameter it is checked against exactly once; buckets leave as they stand whatever the order
in which their gradients become ready, so that all ranks agree without asking each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from foretell.errors import InputError

# torch/nn/parallel/distributed.py: the first bucket is small so that sending starts early.
FIRST_BYTES = 1024 * 1024
BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True)
class Layout:
    """Buckets of parameter names as they leave, and into how many parts each is cut."""

    buckets: tuple[tuple[str, ...], ...]
    parts: tuple[int, ...] = ()  # messages of each bucket; empty: one

    def __post_init__(self) -> None:
        parts = self.parts or (1,) * len(self.buckets)
        object.__setattr__(self, "parts", parts)
        if len(parts) != len(self.buckets) or min(parts, default=1) < 1:
            raise InputError(
                f"the parts of {len(self.buckets)} buckets are {list(parts)}",
                hint="give each bucket one part or more",
            )

    def check(self, names: Sequence[str]) -> None:
        """Raise unless the buckets hold each of these parameters once and nothing else."""
        held = Counter(name for bucket in self.buckets for name in bucket)
        for what, found in (
            ("not in any bucket", [n for n in names if not held[n]]),
            ("in several buckets", [n for n, times in held.items() if times > 1]),
            ("not parameters of the model", sorted(held.keys() - set(names))),
        ):
            if found:
                shown = ", ".join(f"`{n}`" for n in found[:6])
                shown += f" and {len(found) - 6} more" if len(found) > 6 else ""
                raise InputError(
                    f"{shown} {'is' if len(found) == 1 else 'are'} {what}",
                    hint="list every trained parameter in exactly one bucket",
                )


def by_size(
    sizes: Mapping[str, float],
    bucket_bytes: float = BUCKET_BYTES,
    kinds: Mapping[str, object] | None = None,
) -> Layout:
    """Buckets as DDP makes them: last parameter first, closed when they reach their size.

    `sizes` are bytes; parameters of unlike `kinds` are in buckets of their own.
    """
    first = min(FIRST_BYTES, bucket_bytes)
    full, filling = list[list[str]](), dict[object, list[str]]()
    held = defaultdict[object, float](float)
    for name in reversed(list(sizes)):
        kind = kinds[name] if kinds else None
        filling.setdefault(kind, []).append(name)
        held[kind] += sizes[name]
        if held[kind] >= (bucket_bytes if full else first):
            full.append(filling.pop(kind))
            held[kind] = 0
    return Layout(tuple(tuple(bucket) for bucket in (*full, *filling.values())))


def of_parameters(parameters: Mapping[str, Any], bucket_bytes: float = BUCKET_BYTES) -> Layout:
    """DDP's buckets of parameters, each of one format on one device."""
    sizes = {n: p.numel() * p.element_size() for n, p in parameters.items()}
    return by_size(sizes, bucket_bytes, {n: (p.dtype, p.device) for n, p in parameters.items()})


Tensor = Any
Group = Any
ALIKE = "foretell_alike"  # attribute of a module whose buffers all ranks change alike


class Buckets:
    """Reduces gradients as a layout says; `finish` before the optimizer reads them."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        layout: Layout,
        *,
        weight: float,
        group: Group = None,
        dtype: Any = None,  # in which gradients travel and are added up; their own
    ) -> None:
        layout.check(list(parameters))
        self.layout, self.weight, self.group = layout, weight, group
        self.is_syncing = True  # else gradients add up on each rank, and nothing is sent
        self._of = {n: i for i, names in enumerate(layout.buckets) for n in names}
        self._buckets = [
            _Bucket({n: parameters[n] for n in names}, dtype) for names in layout.buckets
        ]
        device = self._buckets[0].flat.device
        self._flags = torch.ones(len(self._of), dtype=torch.int32, device=device)
        self._names = {id(p): n for n, p in parameters.items()}
        self._reset()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._ready) for p in parameters.values()
        ]

    def begin(self) -> None:
        """Send what has not left yet, where all gradients are there."""
        if all(b.parameters[n].grad is not None for b in self._buckets for n in b.missing):
            self._launch(upto=len(self._buckets))

    def finish(self) -> None:
        """Send what has not left yet, wait for everything, and hand the gradients out."""
        self._launch(upto=len(self._buckets))
        for bucket in self._buckets:
            bucket.wait()
        self._hand_out()

    def _hand_out(self) -> None:
        unused = self._unused()
        for bucket in self._buckets:
            bucket.hand_out(unused)
        self._reset()

    def finish_by_message(self, update: Callable[[], Any]) -> None:
        """Update the parameters of each bucket as soon as it is through, while others travel."""
        self._launch(upto=len(self._buckets))
        for bucket in self._buckets:  # an optimizer leaves out what has no gradient
            bucket.hold_back()
        for bucket in self._buckets:
            bucket.wait()
            bucket.hand_out(self._unused() if bucket.absent else set())
            update()
            bucket.hold_back()
        self._hand_out()

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

    def _reset(self) -> None:
        self._next = 0
        self._used_work: Any = None  # under way: which parameters ranks have used
        self._given: set[str] = set()  # taken already when autograd comes to write them
        for bucket in self._buckets:
            bucket.begin()

    def _ready(self, parameter: Tensor) -> None:
        name = self._names[id(parameter)]
        if not self.is_syncing:
            return
        bucket = self._buckets[self._of[name]]
        if name not in self._given:
            if name not in bucket.missing:
                raise InputError(
                    f"a backward inside a backward makes the gradient of `{name}` twice",
                    hint="recompute activations with use_reentrant=False",
                )
            bucket.take(name, self.weight)
        bucket.keep_only(name)
        self._send_full()

    def _send_full(self) -> None:
        """Send the buckets whose gradients are all there, up to the first that lacks one."""
        ahead = self._next
        while ahead < len(self._buckets) and not self._buckets[ahead].missing:
            ahead += 1
        self._launch(upto=ahead)

    def _launch(self, upto: int) -> None:
        """Send the buckets up to this one: in the same order on every rank."""
        while self._next < upto:
            bucket = self._buckets[self._next]
            bucket.gather(self.weight)
            bucket.send(self.layout.parts[self._next] if self.layout.parts else 1, self.group)
            self._next += 1
            if self._next == len(self._buckets):
                self._tell_used()

    def _tell_used(self) -> None:
        """Behind the last bucket: which parameters this rank has used."""
        absent = self._absent()
        self._flags.fill_(1)
        for place, name in enumerate(self._of):
            if name in absent:
                self._flags[place] = 0
        self._used_work = dist.all_reduce(self._flags, group=self.group, async_op=True)

    def _absent(self) -> set[str]:
        return {name for bucket in self._buckets for name in bucket.absent}

    def _unused(self) -> set[str]:
        """Parameters that got no gradient on any rank; a rank that has all need not look."""
        if self._used_work is not None:
            self._used_work.wait()
            self._used_work = None
        if not self._absent():
            return set()
        flags = self._flags.tolist()
        return {name for name, used in zip(self._of, flags, strict=True) if not used}


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
        held = {n: local(p) for n, p in parameters.items()}
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
        grad = local(self.parameters[name].grad if gradient is None else gradient)
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

    def gather(self, weight: float) -> None:
        """Put in what no hook has brought."""
        for name in list(self.missing):  # unused in the last backward, maybe not in those before
            if self.parameters[name].grad is None:
                self.slots[name].zero_()
                self.absent.add(name)
            else:
                self.take(name, weight)

    def send(self, parts: int, group: Group) -> None:
        for part in self.flat.tensor_split(min(parts, self.flat.numel()) or 1):
            self.works.append(dist.all_reduce(part, group=group, async_op=True))

    def hold_back(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []

    def hand_out(self, unused: Collection[str]) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None if name in unused else like(self.slots[name], parameter)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this rank: all of it, unless it is a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def like(slot: Tensor, parameter: Tensor) -> Tensor:
    """A gradient of the parameter's own kind."""
    grad = slot if slot.dtype == parameter.dtype else slot.to(parameter.dtype)
    if not hasattr(parameter, "to_local"):
        return grad
    where, how = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return type(parameter.data).from_local(
        grad, where, how, run_check=False, shape=shape, stride=stride
    )


def broadcast_state(
    model: Any,
    group: Group = None,
    ranks: Sequence[int] | None = None,
    apart: Collection[str] = (),  # parameters that ranks have parts of
) -> None:
    """Give every rank the parameters and buffers of the first."""
    first = (ranks or [0])[0]
    shared = [p for n, p in model.named_parameters() if n not in apart]
    for tensor in [*shared, *model.buffers()]:
        dist.broadcast(local(tensor.detach()), src=first, group=group)


def share_buffers(
    model: Any, group: Group = None, unless: Callable[[], bool] = lambda: False
) -> Any:
    """Before each forward in training, give every rank the buffers of the first, as DDP does."""

    def send(model: Any, _: Any) -> None:
        if model.training and torch.is_grad_enabled() and not unless():
            send_buffers(model, group)

    return model.register_forward_pre_hook(send) if any(True for _ in model.buffers()) else None


def sent_buffers(model: Any) -> list[Tensor]:
    """The buffers that ranks may come to hold other values of."""
    own = [m for m in model.modules() if not getattr(m, ALIKE, False)]
    found = {id(b): b for m in own for b in m.buffers(recurse=False)}
    return list(found.values())


def send_buffers(model: Any, group: Group = None) -> None:
    """Give every rank of a group the buffers of its first, those of one format in one message."""
    first = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    kinds: dict[Any, list[Tensor]] = {}
    for buffer in sent_buffers(model):
        kinds.setdefault((buffer.dtype, buffer.device), []).append(local(buffer.detach()))
    for some in kinds.values():
        flat = torch.cat([one.reshape(-1) for one in some])
        dist.broadcast(flat, src=first, group=group)
        for one, part in zip(some, flat.split([one.numel() for one in some]), strict=True):
            one.copy_(part.view_as(one))
