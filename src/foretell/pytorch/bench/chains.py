"""Chains of small calls, one kind each: what the host cost of an operator is measured on.

A kind is what a model writes (`module.linear` called as a module, `linear` as a function), since
Python is part of the cost. Calls joined by `+` come together because one undoes the other's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from foretell.pytorch.bench.call import Place

LENGTH = 24  # calls in a chain
# Batch, tokens, width and batch, channels, side: on a GPU large enough that libraries pick their
# usual kernels (the host does not wait for them), on a CPU small, since there work is waited for.
_ROWS = {True: (8, 256, 256), False: (2, 8, 16)}
_IMAGES = {True: (8, 64, 28), False: (2, 8, 6)}

Tensor = Any
Link = Callable[[Tensor], Tensor]  # one call, from what flows to what flows


@dataclass(frozen=True)
class Chain:
    """Calls of one kind, each with its own parameters, and the tensor that enters the first."""

    start: Tensor
    links: list[Link]

    def enter(self) -> Tensor:
        """What the first call takes: no leaf, so that calls may work in place."""
        return self.start.clone()

    def flow(self, x: Tensor) -> Tensor:
        """Issue all calls, one on the other's result."""
        for link in self.links:
            x = link(x)
        return x

    def forget(self) -> None:
        """Drop all gradients, as a step does before it begins."""
        self.start.grad = None
        for link in self.links:
            for parameter in _parameters(link):
                parameter.grad = None


def empty(place: Place) -> Chain:
    """A chain without calls."""
    return Chain(_rows(place), [])


def kinds() -> tuple[str, ...]:
    """Names of all kinds of call."""
    return (*_LAYERS, *_IMAGE_LAYERS, *_PLAIN)


def chain(kind: str, place: Place) -> Chain:
    """A chain of calls of one kind."""
    if kind in _PLAIN:
        return Chain(_rows(place), [_PLAIN[kind]] * LENGTH)
    if kind in _IMAGE_LAYERS:
        return Chain(_image(place), [_IMAGE_LAYERS[kind](place) for _ in range(LENGTH)])
    return Chain(_rows(place), [_LAYERS[kind](place) for _ in range(LENGTH)])


def _parameters(link: Link) -> list[Tensor]:
    """Parameters of a module, or tensors a function has closed over."""
    if isinstance(link, torch.nn.Module):
        return list(link.parameters())
    cells = [cell.cell_contents for cell in getattr(link, "__closure__", None) or ()]
    return [t for t in cells if isinstance(t, torch.Tensor) and t.requires_grad]


def _rows(place: Place) -> Tensor:
    return place.randn(*_ROWS[place.is_cuda], grad=True)


def _image(place: Place) -> Tensor:
    batch, channels, side = _IMAGES[place.is_cuda]
    return place.randn(batch, channels, side, side, grad=True)


def _module(made: Callable[[int], Any]) -> Callable[[Place], Link]:
    """A layer of rows called as a module, with its own parameters."""
    return lambda place: made(_ROWS[place.is_cuda][2]).to(place.device)


def _image_module(made: Callable[[int], Any]) -> Callable[[Place], Link]:
    """A layer of images called as a module."""
    return lambda place: made(_IMAGES[place.is_cuda][1]).to(place.device)


def _linear(place: Place) -> Link:
    width = _ROWS[place.is_cuda][2]
    weight, bias = place.randn(width, width, grad=True), place.randn(width, grad=True)
    return lambda x: F.linear(x, weight, bias)


def _embedding(place: Place) -> Link:
    batch, tokens, width = _ROWS[place.is_cuda]
    table, at = place.randn(1000, width, grad=True), place.whole(1000, batch, tokens)
    return lambda x: F.embedding(at, table) + x


def _attention(x: Tensor) -> Tensor:
    heads = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads)
    return mixed.transpose(1, 2).reshape(x.shape)


_LAYERS: dict[str, Callable[[Place], Link]] = {
    "linear": _linear,
    "module.linear": _module(lambda n: torch.nn.Linear(n, n)),
    "module.layer_norm": _module(torch.nn.LayerNorm),
    "module.dropout": _module(lambda n: torch.nn.Dropout(0.1)),
    "module.gelu": _module(lambda n: torch.nn.GELU()),
    "module.identity": _module(lambda n: torch.nn.Identity()),
    "embedding+add": _embedding,
}
_IMAGE_LAYERS: dict[str, Callable[[Place], Link]] = {
    "module.conv2d": _image_module(lambda c: torch.nn.Conv2d(c, c, 3, padding=1, bias=False)),
    "module.conv2d_bias": _image_module(lambda c: torch.nn.Conv2d(c, c, 3, padding=1)),
    "module.conv2d_1x1": _image_module(lambda c: torch.nn.Conv2d(c, c, 1, bias=False)),
    "module.conv2d_depthwise": _image_module(
        lambda c: torch.nn.Conv2d(c, c, 3, padding=1, groups=c, bias=False)
    ),
    "module.batch_norm": _image_module(torch.nn.BatchNorm2d),
    "module.group_norm": _image_module(lambda c: torch.nn.GroupNorm(4, c)),
    "module.silu": _image_module(lambda c: torch.nn.SiLU()),
    "add+relu_": lambda place: lambda x: F.relu_(x + x),
    "max_pool": lambda place: lambda x: F.max_pool2d(x, 3, 1, 1),
    "avg_pool": lambda place: lambda x: F.avg_pool2d(x, 3, 1, 1),
    "adaptive_pool": lambda place: lambda x: F.adaptive_avg_pool2d(x, x.shape[-1]),
    "interpolate": lambda place: lambda x: F.interpolate(x, size=x.shape[2:]),
}
_PLAIN: dict[str, Link] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "dropout": lambda x: F.dropout(x, 0.1, training=True),
    "add": lambda x: x + x,
    "mul": lambda x: x * x,
    "sub": lambda x: x - x,
    "div": lambda x: x / (x.detach() + 9.0),
    "exp": torch.exp,
    "sqrt": lambda x: x.abs().sqrt(),
    "where": lambda x: torch.where(x.detach() > 0, x, 0.0),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "stack+sum": lambda x: torch.stack((x, x)).sum(0),
    "split+cat": lambda x: torch.cat(x.split(x.shape[-1] // 4, dim=-1), dim=-1),
    "add_scalar": lambda x: x + 1.0,
    "mul_scalar": lambda x: x * 0.5,
    "pow": lambda x: x**2,
    "softmax": lambda x: F.softmax(x, dim=-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "matmul": lambda x: torch.matmul(torch.matmul(x, x.transpose(1, 2)), x),
    "attention+views": _attention,
    "view": lambda x: x.view(x.shape),
    "reshape": lambda x: x.reshape(x.shape),
    "transpose+transpose": lambda x: x.transpose(0, 1).transpose(0, 1),
    "permute": lambda x: x.permute(0, 1, 2),
    "slice": lambda x: x[:, :, :],
    "unsqueeze+squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "expand": lambda x: x.expand(x.shape),
    "chunk+cat": lambda x: torch.cat(x.chunk(2, dim=-1), dim=-1),
    "cat": lambda x: torch.cat((x[:1], x[1:])),
    "mean+expand": lambda x: x.mean(-1, keepdim=True).expand(x.shape),
    "sum+expand": lambda x: x.sum(-1, keepdim=True).expand(x.shape),
    "transposed_copy": lambda x: x.transpose(1, 2).contiguous().view(x.shape),
    "cast_both_ways": lambda x: x.to(torch.bfloat16).to(torch.float32),
    "clone": lambda x: x.clone(),
    "roll": lambda x: torch.roll(x, 1, 1),
    "masked_fill": lambda x: x.masked_fill(x.detach() > 9, 0.0),
    "index_select": lambda x: x[:, torch.arange(x.shape[1], device=x.device)],
}
