"""Sufficient factors: a linear layer's gradient sent as what it is the product of.

    ∂L/∂W = Gᵀ X         G: batch × out, X: batch × in

Where batch · (in + out) is less than in · out, gathering X and G from all ranks moves less than
reducing the product; an X that several layers read (query, key and value) is gathered once. The
product over all rows, each rank's weighted by its share of the batch, is the gradient that data
parallel would have. A 1×1 convolution is a linear layer over its pixels.

Factors leave as the backward goes where ranks know each other's rows: as many as their shares of
the batch. They do not know them where a forward looks at values, as one that routes tokens to
experts. The first step shows which it is: its factors leave after the backward, with their counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.errors import InputError

Tensor = Any
Module = Any

# torch 2.13 renamed it and warns of the older name
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Factors:
    """Gathers the factors of some layers during the backward; `finish` makes their gradients."""

    def __init__(
        self,
        modules: dict[str, Module],
        model: Module,  # that calls them
        *,
        shares: Sequence[float],  # rows of each rank, in any unit
        rank: int,
        group: Any = None,
        weight: float | None = None,  # by which this rank's gradients count; its share
    ) -> None:
        for name, module in modules.items():
            why = refusal(module)
            if why:
                raise InputError(f"`{name}` cannot send factors: {why}")
        self.modules, self.group, self.rank = modules, group, rank
        self.shares = [s / sum(shares) for s in shares]
        self.weight = self.shares[rank] if weight is None else weight
        self.is_syncing = True  # else factors are kept until the next backward that sends
        self.knows_rows = False  # of other ranks, without asking them
        self._values: _ValuesRead | None = _ValuesRead(model)
        self._kept: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in modules}
        self._sent: list[tuple[str, _Gathered, _Gathered]] = []
        self._used_beside: list[Tensor] = []
        self._inputs: dict[object, tuple[list[Tensor], _Gathered]] = {}  # kept alive
        self._own = dict.fromkeys(p for m in modules.values() for p in m.parameters())
        self._strays: dict[Tensor, Tensor] = {}  # gradients from uses of a weight beside its layer
        for name, module in modules.items():
            module.forward = self._forward(name, module)
        for parameter in self._own:
            parameter.register_hook(partial(self._strayed, parameter))

    @property
    def parameters(self) -> set[str]:
        """The parameters whose gradients come from factors."""
        return {f"{n}.{p}" for n, m in self.modules.items() for p, _ in m.named_parameters()}

    def begin(self) -> None:
        """Send what was kept, layer by layer as they are named: the same order on every rank."""
        for name, kept in self._kept.items():
            if kept and self.knows_rows:
                self._send(name)

    def finish(self) -> None:
        """Wait for the factors of all ranks and multiply them."""
        if self.knows_rows:
            self.begin()
        else:
            self._send_counted()
        for name, x, g in self._sent:
            for one in (x, g):
                one.work.wait()
            add_gradient(self.modules[name], x.rows, g.rows)
        for parameter in self._used_beside:
            stray = self._strays.pop(parameter, None)
            stray = torch.zeros_like(parameter) if stray is None else stray
            dist.all_reduce(stray, group=self.group)
            _add(parameter, stray)
        self._sent.clear()
        self._inputs.clear()

    def _forward(self, name: str, module: Module) -> Any:
        is_conv = isinstance(module, torch.nn.Conv2d)

        def forward(x: Tensor) -> Tensor:
            rows = _pixels(x, module) if is_conv else x
            y = _Linear.apply(rows, module.weight, module.bias, (self, name))
            return y.movedim(-1, 1) if is_conv else y

        return forward

    def _take(self, name: str, x: Tensor, g: Tensor) -> None:
        """One backward of one layer: send its factors, and those kept before it."""
        self._kept[name].append((x.detach(), rows_of(g) * self.weight))
        if self.is_syncing and self.knows_rows:
            self._send(name)

    def _send_counted(self) -> None:
        """Send what was kept when all ranks have said how many rows that is."""
        kept = {name: [rows_of(x) for x, _ in each] for name, each in self._kept.items()}
        counts = [sum(map(len, parts)) for parts in kept.values()]
        beside = [p in self._strays for p in self._own]
        every = self._exchanged([*counts, *beside, self._values is None or self._values.is_seen])
        counted, used = every[: len(kept)], every[len(kept) : -1]
        self._used_beside = [p for p, each in zip(self._own, used, strict=True) if any(each)]
        for (name, parts), rows in zip(kept.items(), counted, strict=True):
            if any(rows):
                weight = self.modules[name].weight
                grads = [g for _, g in self._kept[name]]
                x, g = (
                    self._gathered([weight.new_empty((0, width)), *some], max(rows))
                    for some, width in ((parts, weight[0].numel()), (grads, len(weight)))
                )
                self._sent.append((name, x, g))
            self._kept[name] = []
        if self._values is not None:
            self._values.remove()
            self._values = None
            self.knows_rows = not any(every[-1]) and all(
                len({self._most(n, rank) for rank, n in enumerate(rows)}) == 1 for rows in counted
            )

    def _exchanged(self, mine: list[int]) -> list[list[int]]:
        """What the ranks say: of each thing, one number a rank."""
        device = next(iter(self._own)).device
        table = torch.zeros((len(mine), len(self.shares)), dtype=torch.int64, device=device)
        table[:, self.rank] = torch.tensor(mine, device=device)
        dist.all_reduce(table, group=self.group)
        return table.tolist()  # type: ignore[no-any-return]

    def _strayed(self, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Keep the gradient of a use beside the layer: it is added up over ranks."""
        if gradient is None:  # of the layer itself, whose factors make it
            return None
        before = self._strays.get(parameter, 0.0)
        self._strays[parameter] = before + gradient * self.weight
        return torch.zeros_like(gradient)

    def _most(self, rows: int, rank: int) -> int:
        """Rows of the rank with most, where one has so many by its share."""
        return round(rows * max(self.shares) / self.shares[rank])

    def _send(self, name: str) -> None:
        kept, self._kept[name] = self._kept[name], []
        inputs = [x for x, _ in kept]
        read = tuple((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in inputs)
        if read not in self._inputs:
            self._inputs[read] = inputs, self._gathered([rows_of(x) for x in inputs])
        gradients = self._gathered([g for _, g in kept])
        self._sent.append((name, self._inputs[read][1], gradients))

    def _gathered(self, parts: list[Tensor], most: int = 0) -> _Gathered:
        """Gather rows; a rank with fewer than `most` sends zeros behind them, which add nothing."""
        mine = torch.cat(parts)
        most = most or self._most(len(mine), self.rank)
        padded = F.pad(mine, (0, 0, 0, most - len(mine))).contiguous()
        rows = padded.new_empty((len(self.shares) * most, padded.shape[1]))
        return _Gathered(_gather(rows, padded, group=self.group, async_op=True), rows)


class _ValuesRead(TorchDispatchMode):  # type: ignore[misc]
    """Whether forwards of a model read values, so that shapes may depend on them."""

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.is_seen = False
        self._hooks = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, *_: Any) -> None:
        self.__enter__()

    def _end(self, *_: Any) -> None:
        self.__exit__(None, None, None)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output
        is_index = op is torch.ops.aten.index.Tensor  # by index, or by a boolean mask
        by_truth = is_index and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        self.is_seen |= by_truth if is_index else any(tag in op.tags for tag in tags)
        return op(*args, **(kwargs or {}))


class _Gathered(NamedTuple):
    """Rows of all ranks on their way."""

    work: Any
    rows: Tensor


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """A linear layer whose backward hands its factors over in place of a weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, to: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.to = to
        flat = weight.reshape(weight.shape[0], -1)
        return F.linear(x, flat, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        factors, name = ctx.to
        factors._take(name, x.to(g.dtype), g)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        back = g @ weight.reshape(weight.shape[0], -1).to(g.dtype)
        return back.to(x.dtype), None, None, None


def refusal(module: Module) -> str:
    """Why a layer has no factors, or nothing."""
    if isinstance(module, torch.nn.Linear):
        return ""
    if not isinstance(module, torch.nn.Conv2d):
        return f"{type(module).__name__} is neither a linear layer nor a 1×1 convolution"
    if (
        module.kernel_size != (1, 1)
        or module.groups != 1
        or module.padding not in ((0, 0), "valid")
    ):
        return f"its kernel is {module.kernel_size}, groups {module.groups}; only 1×1, one group"
    return ""


def _pixels(x: Tensor, conv: Module) -> Tensor:
    """The pixels a 1×1 convolution reads, channels last."""
    down, across = conv.stride
    return x[:, :, ::down, ::across].movedim(1, -1)


def rows_of(x: Tensor) -> Tensor:
    """Samples and tokens of a tensor as rows."""
    return x.reshape(-1, x.shape[-1])


def add_gradient(module: Module, x: Tensor, g: Tensor) -> None:
    """Multiply the factors of all ranks, and add that to a layer's gradients."""
    common = torch.promote_types(x.dtype, g.dtype)
    product = g.to(common).t() @ x.to(common)
    _add(module.weight, product.to(module.weight.dtype).view_as(module.weight))
    if module.bias is not None:
        _add(module.bias, g.sum(0).to(module.bias.dtype))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
