"""Still more models, of tokens and of both: PaLM, RWKV, SRU, DiT, ConvMixer and HRNet's exchange.

They widen what is trained on by positions turned in pairs, shifted tokens, light recurrent cells,
norms scaled by a condition, wide depthwise filters and several image sizes at once. None of them is
a model kept out of training; each shares building blocks with many.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.image import _image, _square
from foretell_lab.fused.models.parts import (
    BatchNorm,
    Conv,
    LayerNorm,
    Linear,
    dropout,
    entropy,
    noise,
    stored,
    wide,
)
from foretell_lab.fused.models.text import Embedded, Made, _tokens, heads_of, merged

Tensor = Any


def _paired(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Positions turned in neighbouring pairs."""
    left, right = x[..., ::2], x[..., 1::2]
    return torch.stack((left * cos - right * sin, left * sin + right * cos), -1).flatten(-2)


class PalmLayer(nn.Module):  # type: ignore[misc]
    """PaLM: one norm, attention and a gated layer side by side, one head of keys for all."""

    def __init__(self, width: int, heads: int, precision: str) -> None:
        super().__init__()
        self.heads, self.each = heads, width // heads
        self.norm = LayerNorm(width, precision)
        self.sizes = (width, self.each, self.each, 4 * width, 4 * width)
        self.enter = Linear(width, sum(self.sizes), precision, False)
        self.out, self.down = (
            Linear(width, width, precision, False),
            Linear(4 * width, width, precision, False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v, gate, up = self.enter(self.norm(x)).split(self.sizes, -1)
        q, k = _paired(heads_of(q, self.heads), cos, sin), _paired(k.unsqueeze(1), cos, sin)
        k, v = (t.expand(q.shape) for t in (k, v.unsqueeze(1)))
        mixed = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=True)
        return x + self.out(merged(mixed)) + self.down(F.silu(gate) * up)


class Palm(Embedded):
    """Two layers with embeddings and head."""

    def __init__(self, width: int, heads: int, precision: str) -> None:
        super().__init__(32000, 1, width, precision, 0.0)
        self.layers = nn.ModuleList([PalmLayer(width, heads, precision) for _ in range(2)])
        self.norm, self.head = LayerNorm(width, precision), Linear(width, 32000, precision, False)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = F.embedding(ids, self.tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def palm(chance: Random, precision: str) -> Made:
    """Two layers of PaLM."""
    width, heads = chance.choice(((768, 12), (1024, 16), (2048, 16), (3072, 24), (4096, 16)))
    batch, length = _tokens(chance, width)
    turns = [noise(1, 1, length, width // heads // 2, precision=precision) for _ in range(2)]
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return Palm(width, heads, precision), (ids, *turns), lambda y: entropy(precision, y)


class RwkvLayer(nn.Module):  # type: ignore[misc]
    """RWKV's layers over tokens mixed with the one before: gates, squared ReLU, no attention."""

    def __init__(self, width: int, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm(width, precision) for _ in range(2)])
        mixes = torch.empty(4, width, dtype=stored(precision))
        self.mixes = nn.Parameter(mixes)
        self.key, self.value = (Linear(width, width, precision, False) for _ in range(2))
        self.gate, self.out = (Linear(width, width, precision, False) for _ in range(2))
        self.up, self.down = (
            Linear(width, 4 * width, precision, False),
            Linear(4 * width, width, precision, False),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        before = F.pad(h, (0, 0, 1, -1))
        k, v, r = (h * m + before * (1 - m) for m in self.mixes[:3])
        mixed = torch.sigmoid(self.gate(r)) * torch.exp(-self.key(k).float().abs()) * self.value(v)
        x = x + self.out(mixed.to(x.dtype))
        h = self.norms[1](x)
        h = h * self.mixes[3] + F.pad(h, (0, 0, 1, -1)) * (1 - self.mixes[3])
        return x + self.down(F.relu(self.up(h)).square())


def rwkv(chance: Random, precision: str) -> Made:
    """Two layers of RWKV."""
    width = chance.choice((512, 768, 1024, 2048, 2560))
    batch, length = _tokens(chance, width)
    x = noise(batch, length, width, precision=precision, grad=True)
    return nn.Sequential(RwkvLayer(width, precision), RwkvLayer(width, precision)), (x,), _square


class Sru(nn.Module):  # type: ignore[misc]
    """A language model of SRU cells: gates from the input alone, then a light recurrence."""

    def __init__(self, vocabulary: int, width: int, precision: str) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(vocabulary, width, dtype=stored(precision)))
        self.enter, self.head = (
            Linear(width, 4 * width, precision),
            Linear(width, vocabulary, precision),
        )
        self.peeps = nn.Parameter(torch.empty(2, width, dtype=stored(precision)))

    def forward(self, ids: Tensor, c: Tensor) -> Tensor:
        x = dropout(F.embedding(ids, self.tokens), 0.2)
        value, forget, reset, carry = self.enter(x).chunk(4, -1)
        outs = []
        for t in range(x.shape[1]):
            f = torch.sigmoid(forget[:, t] + self.peeps[0] * c)
            r = torch.sigmoid(reset[:, t] + self.peeps[1] * c)
            c = f * c + (1 - f) * value[:, t]
            outs.append(r * torch.tanh(c) + (1 - r) * carry[:, t])
        return self.head(dropout(torch.stack(outs, 1), 0.2))


def sru(chance: Random, precision: str) -> Made:
    """Three steps of an SRU language model."""
    width = chance.choice((300, 512, 700, 910, 1280, 1800))
    batch = chance.choice((16, 48, 100, 200, 400, 1500))
    ids, c = torch.zeros(batch, 3, dtype=torch.int64), noise(batch, width, precision=precision)
    model = Sru(chance.choice((10000, 27000, 32000)), width, precision)
    return model, (ids, c), lambda y: entropy(precision, y)


class DitBlock(nn.Module):  # type: ignore[misc]
    """A diffusion transformer's block: norms without weights, scaled and shifted by the step."""

    def __init__(self, width: int, precision: str) -> None:
        super().__init__()
        self.qkv, self.out = Linear(width, 3 * width, precision), Linear(width, width, precision)
        self.up, self.down = (
            Linear(width, 4 * width, precision),
            Linear(4 * width, width, precision),
        )
        self.tell, self.width, self.precision = (
            Linear(width, 6 * width, precision),
            width,
            precision,
        )

    def _modulated(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(wide(self.precision, x), (self.width,)) * (1 + scale) + shift

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, about = given
        a, b, c, d, e, f = self.tell(F.silu(about)).unsqueeze(1).chunk(6, -1)
        h = self.qkv(self._modulated(x, a, b)).chunk(3, -1)
        q, k, v = (heads_of(t, self.width // 64) for t in h)
        x = x + c * self.out(merged(F.scaled_dot_product_attention(q, k, v)))
        h = F.gelu(self.up(self._modulated(x, d, e)), approximate="tanh")
        return x + f * self.down(h), about


class Dit(nn.Module):  # type: ignore[misc]
    """Two blocks."""

    def __init__(self, width: int, precision: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DitBlock(width, precision) for _ in range(2)])

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        for block in self.blocks:
            x, about = block((x, about))
        return x


def dit(chance: Random, precision: str) -> Made:
    """Two blocks of a diffusion transformer."""
    width = chance.choice((384, 768, 1024, 1152))
    batch, length = chance.choice((4, 8, 16, 32)), chance.choice((64, 256, 1024))
    x = noise(batch, length, width, precision=precision, grad=True)
    return Dit(width, precision), (x, noise(batch, width, precision=precision)), _square


class MixerBlock(nn.Module):  # type: ignore[misc]
    """ConvMixer: a wide depthwise filter beside a shortcut, then one over channels."""

    def __init__(self, c: int, size: int, precision: str) -> None:
        super().__init__()
        self.deep = Conv(c, c, size, precision, groups=c, bias=True)
        self.flat = Conv(c, c, 1, precision, bias=True)
        self.norms = nn.ModuleList([BatchNorm(c, precision) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norms[0](F.gelu(self.deep(x)))
        return self.norms[1](F.gelu(self.flat(x)))


def convmixer(chance: Random, precision: str) -> Made:
    """Two blocks of ConvMixer."""
    c, side = chance.choice(((256, 32), (512, 16), (768, 16), (1024, 14), (384, 28), (1536, 8)))
    x = _image(chance, precision, c, side)
    size = chance.choice((5, 7, 9))
    return nn.Sequential(*(MixerBlock(c, size, precision) for _ in range(2))), (x,), _square


class Exchange(nn.Module):  # type: ignore[misc]
    """HRNet: two image sizes side by side, each given to the other."""

    def __init__(self, c: int, precision: str) -> None:
        super().__init__()
        self.less, self.more = Conv(c, 2 * c, 3, precision, 2), Conv(2 * c, c, 1, precision)
        self.own = nn.ModuleList([Conv(n, n, 3, precision) for n in (c, 2 * c)])
        self.norms = nn.ModuleList([BatchNorm(n, precision) for n in (c, 2 * c, 2 * c, c)])

    def forward(self, x: Tensor) -> Tensor:
        small = F.relu(self.norms[1](self.less(x)))
        large = F.relu(self.norms[0](self.own[0](x)) + x)
        small = F.relu(self.norms[2](self.own[1](small)) + small)
        up = F.interpolate(self.norms[3](self.more(small)), scale_factor=2, mode="nearest")
        large = F.relu(large + up)
        small = F.interpolate(small, scale_factor=2, mode="nearest")
        return torch.cat((large.to(small.dtype), small), 1)


def exchange(chance: Random, precision: str) -> Made:
    """One exchange of HRNet."""
    c, side = chance.choice(((18, 56), (32, 56), (48, 56), (64, 28), (96, 28), (128, 14)))
    x = _image(chance, precision, c, side)
    return Exchange(c, precision), (x,), _square


WIDE_MIXED: dict[str, Callable[[Random, str], Made]] = {
    "palm": palm,
    "rwkv": rwkv,
    "sru": sru,
    "dit": dit,
    "convmixer": convmixer,
    "exchange": exchange,
}
