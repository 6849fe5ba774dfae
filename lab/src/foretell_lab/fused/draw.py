"""Regions drawn at random: chains and graphs of ops over the shapes of real models.

A program starts from one tensor and applies ops picked at random to the latest value or an earlier
one; what else an op needs enters as a new tensor, of the same shape or broadcast. Some intermediate
values leave as well. A third of the programs is differentiated and cut from the joint graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from foretell_lab.fused.capture import Captured, capture
from foretell_lab.fused.cut import Net, cut, regions, worthwhile
from foretell_lab.fused.region import Region

Tensor = Any
_WIDTHS: tuple[int, ...] = (
    64,
    96,
    128,
    192,
    256,
    320,
    384,
    512,
    640,
    768,
    1000,
    1024,
    1280,
    1536,
    2048,
    2304,
    2560,
)
_WIDTHS += (3072, 4096, 5120, 6144, 8192, 11008, 14336, 16384, 30522, 32000, 50257)
_CHANNELS = (3, 16, 24, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
_SIDES = (7, 8, 14, 16, 28, 32, 56, 64, 112)
_PLACES = (1 << 18, 1 << 21, 1 << 24, 1 << 26, 1 << 27)  # the most elements of a first tensor


@dataclass
class Program:
    """A program while it is drawn: what it needs to enter, and the picks it makes again later."""

    chance: Random
    extra: list[Tensor] = field(default_factory=list)

    def enter(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(tuple(shape), dtype=dtype)
        self.extra.append(made)
        return made


def shape(chance: Random, places: Sequence[int] = _PLACES) -> tuple[int, ...]:
    """A shape as models have them; by default of 4 thousand to 128 million elements."""
    kind, most = chance.random(), chance.choice(places)
    if kind < 0.45:
        width = chance.choice(_WIDTHS)
        rows = max(1, int(most * 2 ** chance.uniform(-2, 0)) // width)
        rows = rows if chance.random() < 0.3 else max(8, rows // 8 * 8)
        batch = chance.choice((1, 2, 4, 8))
        return (batch, max(1, rows // batch), width) if chance.random() < 0.6 else (rows, width)
    if kind < 0.8:
        channels, side = chance.choice(_CHANNELS), chance.choice(_SIDES)
        return (max(1, most // (channels * side * side)), channels, side, side)
    if kind < 0.9:
        length, heads = (
            chance.choice((49, 64, 128, 197, 256, 512, 1024)),
            chance.choice((4, 8, 12, 16)),
        )
        return (max(1, most // (heads * length * length)), heads, length, length)
    return (int(most * 2 ** chance.uniform(-3, 0)),)


def drawn(chance: Random, count: int, places: Sequence[int] = _PLACES) -> Iterator[Region]:
    """Regions drawn at random."""
    made = 0
    while made < count:
        with FakeTensorMode(allow_non_fake_inputs=True):
            captured, differentiated = program(chance, places)
        net = Net(captured)
        if differentiated:
            found = list(regions(net, chance, "drawn", 2))
        else:
            ops = {i for i, s in enumerate(captured.steps) if s.name}
            found = [cut(net, ops, "drawn")] if worthwhile(net, ops) else []
        made += len(found)
        yield from found


def program(chance: Random, places: Sequence[int] = _PLACES) -> tuple[Captured, bool]:
    """A random program's ops, and whether its gradient is among them."""
    dtype = chance.choice((torch.float32, torch.bfloat16))
    first = torch.empty(shape(chance, places), dtype=dtype)
    if first.dim() == 4 and chance.random() < 0.3:
        first = first.to(memory_format=torch.channels_last)
    length = chance.choice((1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 12, 16, 24))
    ops = chance.choices(list(_OPS), weights=list(_OPS.values()), k=length)
    seed, differentiates = chance.random(), chance.random() < 0.35
    needed = Program(Random(seed))
    _run(needed, ops, first, seed)
    entries = [first, *needed.extra]

    def forward(*tensors: Tensor) -> list[Tensor]:
        return _run(Program(Random(seed)), ops, tensors[0], seed, list(tensors[1:]))

    def joint(*tensors: Tensor) -> list[Tensor]:
        wanted = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
        loss = forward(*wanted)[-1].float().square().sum()
        inputs = [t for t in wanted if t.requires_grad]
        return [g for g in torch.autograd.grad(loss, inputs, allow_unused=True) if g is not None]

    return capture(joint if differentiates else forward, entries), differentiates


def _run(
    p: Program, ops: Sequence[Callable[..., Tensor]], first: Tensor, seed: float,
    given: list[Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Run a program; the second time tensors that entered the first time are given."""
    if given is not None:
        left = iter(given)
        p.enter = lambda shape, dtype: next(left)  # type: ignore[method-assign]
    values, kept, chance = [first], [], Random(seed + 1)
    for op in ops:
        large = [v for v in values if v.numel() >= 256]  # what is small ends its branch
        source = large[-1] if chance.random() < 0.8 else chance.choice(large)
        values.append(op(p, source, values))
        if chance.random() < 0.15:
            kept.append(values[-1])
    return [*kept, values[-1]]


def _unary(p: Program, x: Tensor, values: list[Tensor]) -> Tensor:
    return p.chance.choice(_UNARY)(x)


def _binary(p: Program, x: Tensor, values: list[Tensor]) -> Tensor:
    pick = p.chance.random()
    others = [v for v in values if v.shape == x.shape and v is not x]
    if pick < 0.35 and others:
        other = p.chance.choice(others)
    elif pick < 0.6:
        other = p.enter(x.shape, p.chance.choice((x.dtype, x.dtype, torch.float32)))
    elif pick < 0.9:
        other = p.enter(_broadcast(p.chance, x), x.dtype)
    else:
        other = p.chance.choice((0.5, 2.0, 1e-3))
    return p.chance.choice(_BINARY)(x, other)


def _broadcast(chance: Random, x: Tensor) -> tuple[int, ...]:
    if x.dim() == 4:
        return chance.choice(((x.shape[1], 1, 1), (x.shape[0], x.shape[1], 1, 1), x.shape[1:]))
    if x.dim() == 1 or chance.random() < 0.25:
        return (*x.shape[:-1], 1)
    return tuple(x.shape[-1:]) if chance.random() < 0.7 else tuple(x.shape[1:])


def _norm(p: Program, x: Tensor, values: list[Tensor]) -> Tensor:
    if x.dim() == 1:
        return _unary(p, x, values)
    pick = p.chance.random()
    if x.dim() == 4 and pick < 0.6:
        return _image_norm(p, x)
    if pick < 0.4:
        weight, bias = (p.enter(x.shape[-1:], x.dtype) for _ in range(2))
        return F.layer_norm(x, x.shape[-1:], weight, bias)
    if pick < 0.6:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return (F.softmax if pick < 0.9 else F.log_softmax)(x, -1)


def _image_norm(p: Program, x: Tensor) -> Tensor:
    c = x.shape[1]
    if x.numel() == c:  # one value of each channel has no spread
        return F.relu(x)
    weight, bias = (p.enter((c,), torch.float32) for _ in range(2))
    if p.chance.random() < 0.6 or c % 32:
        return F.batch_norm(x, None, None, weight, bias, training=True)
    return F.group_norm(x.float(), 32, weight, bias)


def _reduce(p: Program, x: Tensor, values: list[Tensor]) -> Tensor:
    if x.numel() < 4096:
        return _unary(p, x, values)
    dims = tuple(range(x.dim()))
    choices = [dims[-1:], dims[:-1] or dims, dims, (0, *dims[2:]), dims[2:] or dims[-1:]]
    dim = p.chance.choice(choices)
    keep = p.chance.random() < 0.5
    how = p.chance.choice((torch.sum, torch.sum, torch.mean, torch.amax))
    small = how(x, dim=dim, keepdim=keep)
    return x - small if keep and p.chance.random() < 0.8 else small


def _dropout(p: Program, x: Tensor, values: list[Tensor]) -> Tensor:
    return torch.native_dropout(x, 0.1, True)[0]


def _cast(p: Program, x: Tensor, values: list[Tensor]) -> Tensor:
    return x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32)


def _where(p: Program, x: Tensor, values: list[Tensor]) -> Tensor:
    mask = p.enter(x.shape if p.chance.random() < 0.5 else x.shape[-1:], torch.bool)
    return x.masked_fill(mask, -1e4) if p.chance.random() < 0.5 else torch.where(mask, x, x * 0.1)


def _gate(p: Program, x: Tensor, values: list[Tensor]) -> Tensor:
    if x.dim() < 2 or x.shape[-1] % 2:
        return _unary(p, x, values)
    left, right = x.chunk(2, -1)
    pick = p.chance.random()
    if pick < 0.5:
        return F.silu(left) * right
    return torch.cat((-right, left), -1) if pick < 0.8 else torch.sigmoid(left) * torch.tanh(right)


def _move(p: Program, x: Tensor, values: list[Tensor]) -> Tensor:
    if x.dim() < 3:
        return _unary(p, x, values)
    pick = p.chance.random()
    if x.dim() == 4 and pick < 0.5:
        return _resize(p, x) if pick < 0.25 else _windows(p, x)
    if pick < 0.65:
        return x.transpose(1, 2).contiguous()
    if pick < 0.85:
        return torch.cat((x, p.enter(x.shape, x.dtype)), 1)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _resize(p: Program, x: Tensor) -> Tensor:
    """A larger or smaller image."""
    if p.chance.random() < 0.5 or x.shape[2] % 2 or x.shape[2] < 8 or x.shape[3] < 2:
        return F.interpolate(x, scale_factor=2, mode="nearest") if x.numel() < 1 << 25 else x * 2.0
    return F.avg_pool2d(x, 2)


def _windows(p: Program, x: Tensor) -> Tensor:
    """An image rolled, or cut into windows."""
    n = next((n for n in (7, 8, 4, 2) if x.shape[2] % n == 0 and x.shape[3] % n == 0), 0)
    if not n or p.chance.random() < 0.4:
        return torch.roll(x, (n // 2 + 1, n // 2 + 1), (2, 3))
    b, c, h, w = x.shape
    cut = x.reshape(b, c, h // n, n, w // n, n)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(-1, n * n, c)


_UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    F.relu, F.relu, F.gelu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, torch.tanh,
    torch.sigmoid, torch.exp, lambda x: x * x, torch.abs, lambda x: torch.rsqrt(x * x + 1.0),
    lambda x: x * 0.5, lambda x: x + 1.0, F.hardswish, lambda x: F.leaky_relu(x, 0.1), torch.neg,
    lambda x: x.clamp(-3.0, 3.0), F.elu, lambda x: torch.log1p(x.abs()),
    lambda x: torch.sqrt(x.abs()), F.hardsigmoid, lambda x: F.relu6(x), torch.cos,
    torch.square, torch.reciprocal, lambda x: torch.log(x.abs() + 1.0), F.softplus, F.mish,
    torch.expm1, torch.erf, torch.sin, torch.sign, torch.floor,
)  # fmt: skip
_BINARY: tuple[Callable[[Tensor, Any], Tensor], ...] = (
    lambda x, y: x + y, lambda x, y: x + y, lambda x, y: x * y, lambda x, y: x * y,
    lambda x, y: x - y, lambda x, y: x / (y * y + 1.0),
    lambda x, y: x * y if isinstance(y, float) else torch.maximum(x, y.to(x.dtype)),
    lambda x, y: x - y if isinstance(y, float) else torch.minimum(x, y.to(x.dtype)),
    lambda x, y: x + y if isinstance(y, float) else torch.lerp(x, y.to(x.dtype), 0.1),
)  # fmt: skip
_OPS = {
    _unary: 6.0, _binary: 7.0, _norm: 1.6, _reduce: 0.9, _dropout: 0.5, _cast: 1.0, _where: 0.5,
    _gate: 0.4, _move: 0.7,
}  # fmt: skip
