"""Images split over ranks by height, width and depth: each rank computes its part of every layer.

A convolution or pooling of kernel k, stride s, padding p and dilation d makes output rows [o, e)
from input rows [o·s − p, (e − 1)·s − p + d·(k − 1) + 1): what of them other ranks hold is fetched
(a halo), what lies outside is padding. Weights are the same everywhere and their gradients are
summed in the backward. A layer that needs the whole image (flatten, adaptive pooling) gathers it;
from there on all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from foretell.errors import InputError
from foretell.pytorch.deploy.batch_norm import normalize
from foretell.pytorch.deploy.collective import (
    both_ways,
    copy_in,
    cut,
    even,
    everyones,
    gather,
    new_groups,
)

Tensor = Any
Module = Any
Span = tuple[int, int]

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_WHOLE = (
    *(nn.Flatten, nn.AdaptiveMaxPool2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
# one value at a time: nothing to exchange
_POINTWISE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity)
_AFTER = (nn.Linear, nn.LayerNorm, nn.Softmax, nn.LogSoftmax)  # on what was gathered


class Grid:
    """How ranks divide an image: so many parts along each dim of it, a group for each line."""

    def __init__(self, parts: Sequence[int], group: Any = None) -> None:
        self.parts, self.group = tuple(parts), group
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        total = int(torch.tensor(self.parts).prod())
        if total != len(ranks):
            raise InputError(f"a grid of {'×'.join(map(str, parts))} on {len(ranks)} ranks")
        places = torch.tensor(ranks).reshape(self.parts)
        self.lines = [_line(places, axis) for axis in range(len(self.parts))]
        self.is_whole = False  # the image was gathered earlier in this forward
        self._sizes: dict[Any, list[int]] = {}
        self._batch: Any = None
        self._calls = 0

    def begin(self, x: Tensor) -> Tensor:
        """A forward of the whole model begins; this rank's part of its images."""
        self._batch, self._calls, self.is_whole = tuple(x.shape), 0, False
        for axis in self.axes:
            x = cut(x, 2 + axis, even(x.shape[2 + axis], self.parts[axis]), self.lines[axis])
        return x

    def have(self, x: Tensor, axis: int) -> list[Span]:
        """Which rows each rank of this rank's line holds; asked once for each call in a forward.

        All ranks make the same calls in the same order, so they ask together or not at all.
        """
        key = (self._batch, self._calls)
        self._calls += 1
        if key not in self._sizes:
            self._sizes[key] = everyones(x.shape[2 + axis], self.lines[axis])
        return spans(self._sizes[key])

    @property
    def axes(self) -> list[int]:
        """The axes along which there is more than one part."""
        return [a for a, n in enumerate(self.parts) if n > 1]


def split_spatial(
    model: Module,
    parts: Sequence[int],
    group: Any = None,
    among: Any = None,
    weight: float = 1.0,
) -> Grid:
    """Let each rank compute its part of the image; every rank passes the whole batch in.

    Statistics of a batch norm are those of `among`: the ranks of an image where it is None.
    `weight`: what this rank's loss counts by (→ batch_norm.synchronize_norms).
    """
    why = refusal(model)
    if why:
        raise InputError(f"the images of this model cannot be split: {why}")
    grid = Grid(parts, group)
    for name, module in model.named_modules():
        if isinstance(module, _CONVS):
            module.forward = partial(_on_part, grid, name, partial(_convolve, module, grid))
        elif isinstance(module, _POOLS):
            pool = partial(_pool, module, grid, module.forward)
            module.forward = partial(_on_part, grid, name, pool)
        elif isinstance(module, _NORMS):
            whole = grid.group or dist.group.WORLD
            call = partial(normalize, module, among or grid.group, parts=whole, weight=weight)
            module.forward = partial(_on_part, grid, name, call)
        elif isinstance(module, _WHOLE):
            module.forward = partial(_on_whole, grid, module.forward)
    model.register_forward_pre_hook(lambda _, args: (grid.begin(args[0]), *args[1:]))
    return grid


def refusal(model: Module) -> str:
    """Why the images of a model cannot be split, or nothing."""
    known = (*_CONVS, *_POOLS, *_NORMS, *_WHOLE, *_POINTWISE, *_AFTER)
    for name, module in model.named_modules():
        is_leaf = not any(True for _ in module.children())
        if is_leaf and not isinstance(module, known):
            return f"`{name}` is a {type(module).__name__}, which has no rule to split it"
        if isinstance(module, _CONVS) and module.padding_mode != "zeros":
            return f"`{name}` pads with {module.padding_mode}"
        if isinstance(module, _POOLS) and getattr(module, "ceil_mode", False):
            return f"`{name}` rounds its size up"
    if not any(isinstance(m, _CONVS) for m in model.modules()):
        return f"{type(model).__name__} has no convolution"
    return ""


def _line(places: Any, axis: int) -> Any:
    """The group of ranks that differ from this one along one axis only."""
    lines = places.movedim(axis, -1).reshape(-1, places.shape[axis]).tolist()
    mine = next(line for line in lines if dist.get_rank() in line)
    return new_groups([mine])[tuple(mine)]


def _on_whole(grid: Grid, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Gather the image, unless that was done before, then do what the layer does."""
    for axis in [] if grid.is_whole else grid.axes:
        sizes = [e - s for s, e in grid.have(x, axis)]
        x = gather(x, 2 + axis, sizes, grid.lines[axis])
    grid.is_whole = True
    return call(x)


def _on_part(grid: Grid, name: str, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if grid.is_whole:
        raise InputError(
            f"`{name}` comes after a layer that gathered the image",
            hint="a model with such a branch cannot be split by space",
        )
    return call(x)


def _convolve(conv: Module, grid: Grid, x: Tensor) -> Tensor:
    pads = _pads(conv, x)
    for axis in grid.axes:
        x = _with_halo(x, axis, _reach(conv, axis, pads[axis]), grid)
        pads[axis] = (0, 0)
    x = nn.functional.pad(x, [p for pair in reversed(pads) for p in pair])
    weight = copy_in(conv.weight, grid.group)
    bias = None if conv.bias is None else copy_in(conv.bias, grid.group)
    call = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[x.dim()]
    return call(x, weight, bias, conv.stride, 0, conv.dilation, conv.groups)


def _pool(pool: Module, grid: Grid, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    pads = _pads(pool, x)
    is_max = "Max" in type(pool).__name__
    for axis in grid.axes:
        reach = _reach(pool, axis, pads[axis])
        x = _with_halo(x, axis, reach, grid, outside=float("-inf") if is_max else 0.0)
        pads[axis] = (0, 0)
    padding = tuple(p[0] for p in pads)
    with patch.object(pool, "padding", padding if len(pads) > 1 else padding[0]):
        return call(x)


def _pads(layer: Module, x: Tensor) -> list[Span]:
    """Padding before and behind, along each axis of the image."""
    dims = x.dim() - 2
    if layer.padding in ("valid", "same"):
        width = [
            (k - 1) * d * (layer.padding == "same")
            for k, d in zip(layer.kernel_size, layer.dilation, strict=True)
        ]
        return [(w // 2, w - w // 2) for w in width]
    return [(p, p) for p in _each(layer.padding, dims)]


def _reach(layer: Module, axis: int, pad: Span) -> tuple[int, int, Span]:
    """Rows read for one output row, the stride between them, and the padding."""
    at = axis + 1
    kernel, stride = _each(layer.kernel_size, at)[axis], _each(layer.stride, at)[axis]
    dilation = _each(getattr(layer, "dilation", 1), at)[axis]
    return dilation * (kernel - 1) + 1, stride, pad


def _each(value: Any, num: int) -> list[int]:
    return list(value) if isinstance(value, tuple | list) else [value] * num


def _with_halo(
    x: Tensor, axis: int, reach: tuple[int, int, Span], grid: Grid, outside: float = 0.0
) -> Tensor:
    """The rows that this rank's part of the output is made from."""
    rows, stride, (before, behind) = reach
    dim, line = 2 + axis, grid.lines[axis]
    have = grid.have(x, axis)
    total = have[-1][1]
    made = (total + before + behind - rows) // stride + 1
    if made < len(have):
        raise InputError(f"an image of {total} rows leaves {made} for {len(have)} ranks")
    outputs = spans(even(made, len(have)))
    want = [(o * stride - before, (e - 1) * stride - before + rows) for o, e in outputs]
    rank = dist.get_rank(line)
    x = exchange(x, dim, have, want, line)
    return _padded(x, dim, want[rank], total, outside) if outside else x


def _padded(x: Tensor, dim: int, want: Span, total: int, outside: float) -> Tensor:
    """Rows past the ends of the image set to a value other than zero."""
    rows = torch.arange(want[0], want[1], device=x.device)
    is_outside = (rows < 0) | (rows >= total)
    if not bool(is_outside.any()):
        return x
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    return x.masked_fill(is_outside.view(shape), outside)


def exchange(
    x: Tensor, dim: int, have: Sequence[Span], want: Sequence[Span], group: Any = None
) -> Tensor:
    """The rows this rank wants, of a dim whose rows `have` says who holds.

    Rows [a, b) that a rank wants may overlap what others want (a halo) and reach past the ends
    (zeros). Forward sends each row to all who want it; backward sends gradients home and adds up.
    """
    if tuple(have) == tuple(want):
        return x
    return both_ways(
        x,
        lambda y: _moved(y, dim, have, want, group),
        lambda g: _moved(g, dim, want, have, group),
    )


def spans(sizes: Sequence[int]) -> list[Span]:
    """Where parts of these sizes begin and end."""
    ends = [sum(sizes[: r + 1]) for r in range(len(sizes))]
    return [(e - s, e) for s, e in zip(sizes, ends, strict=True)]


def _moved(x: Tensor, dim: int, have: Sequence[Span], want: Sequence[Span], group: Any) -> Tensor:
    """Rows from those who have them, added up where several do."""
    rank = dist.get_rank(group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    shape = list(x.shape)
    shape[dim] = want[rank][1] - want[rank][0]
    found = x.new_zeros(shape)
    sent, due = [], []
    for other in range(len(have)):
        if other == rank:
            continue
        if out := _overlap(have[rank], want[other]):
            piece = _rows(x, dim, have[rank], out).contiguous()
            sent.append((dist.isend(piece, dst=ranks[other], group=group), piece))
        if back := _overlap(want[rank], have[other]):
            into = torch.empty_like(_rows(found, dim, want[rank], back)).contiguous()
            due.append((dist.irecv(into, src=ranks[other], group=group), into, back))
    if own := _overlap(have[rank], want[rank]):
        _rows(found, dim, want[rank], own).add_(_rows(x, dim, have[rank], own))
    for work, into, back in due:
        work.wait()
        _rows(found, dim, want[rank], back).add_(into)
    for work, _ in sent:
        work.wait()
    return found


def _overlap(one: Span, other: Span) -> Span | None:
    first, last = max(one[0], other[0]), min(one[1], other[1])
    return (first, last) if first < last else None


def _rows(x: Tensor, dim: int, held: Span, wanted: Span) -> Tensor:
    return x.narrow(dim, wanted[0] - held[0], wanted[1] - wanted[0])
