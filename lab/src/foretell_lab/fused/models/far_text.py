"""Models of tokens farther off: MPT, Falcon, Mamba, QRNN and highways.

They widen what is trained on by distances added to scores, filters along time, states wider than
tokens and gates without matmuls. None of them is a model kept out of training.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.image import _square
from foretell_lab.fused.models.parts import (
    LayerNorm,
    Linear,
    RmsNorm,
    dropout,
    entropy,
    half,
    noise,
    stored,
)
from foretell_lab.fused.models.text import Made, _tokens, heads_of, merged, turned

Tensor = Any


class Along(nn.Module):  # type: ignore[misc]
    """A filter along time; a causal one sees the past alone."""

    def __init__(
        self, c: int, k: int, size: int, precision: str, far: int = 1, groups: int = 1,
        causal: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = nn.Parameter(torch.empty(k, c // groups, size, dtype=stored(precision)))
        self.bias = nn.Parameter(torch.empty(k, dtype=stored(precision)))
        self.precision, self.far, self.groups = precision, far, groups
        self.pad = (size - 1) * far if causal else size // 2 * far
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = half(self.precision, x, self.weight, self.bias)
        x = F.pad(x, (self.pad, 0)) if self.causal else x
        pad = 0 if self.causal else self.pad
        return F.conv1d(x, weight, bias, 1, pad, self.far, self.groups)


class Distant(nn.Module):  # type: ignore[misc]
    """MPT: distances times a slope are added to the scores; norms without shifts, no biases."""

    def __init__(self, width: int, heads: int, clip: float, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm(width, precision, bias=False) for _ in range(2)])
        self.qkv, self.out = (Linear(width, n * width, precision, False) for n in (3, 1))
        self.up, self.down = (
            Linear(width, 4 * width, precision, False),
            Linear(4 * width, width, precision, False),
        )
        self.heads, self.clip, self.precision = heads, clip, precision

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = torch.matmul(*half(self.precision, q, k.transpose(-1, -2))) * q.shape[-1] ** -0.5
        n = scores.shape[-1]
        places = torch.arange(n, device=q.device)
        slopes = torch.exp2(-8.0 * torch.arange(1, self.heads + 1, device=q.device) / self.heads)
        away = (places[None, :] - places[:, None]).to(scores.dtype)
        scores = scores + slopes.to(scores.dtype)[:, None, None] * away
        return torch.where(away > 0, -1e4, scores)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).clamp(-self.clip, self.clip)
        q, k, v = (heads_of(t, self.heads) for t in qkv.chunk(3, -1))
        chosen = F.softmax(self._scores(q, k).float(), -1).to(v.dtype)
        x = x + self.out(merged(torch.matmul(*half(self.precision, chosen, v))))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def mpt(chance: Random, precision: str) -> Made:
    """Two layers of MPT."""
    width, heads = chance.choice(((384, 6), (576, 8), (768, 12), (1024, 16), (2048, 16)))
    batch, length = _tokens(chance, 4 * width)
    x = noise(batch, min(length, 1024), width, precision=precision, grad=True)
    layers = [Distant(width, heads, 6.0, precision) for _ in range(2)]
    return nn.Sequential(*layers), (x,), _square


class Beside(nn.Module):  # type: ignore[misc]
    """Falcon and Phi: one norm, attention and layers beside each other, one head of keys."""

    def __init__(self, width: int, heads: int, rate: float, precision: str) -> None:
        super().__init__()
        each = width // heads
        self.sizes = (width, each, each)
        self.norm, self.heads, self.rate = LayerNorm(width, precision), heads, rate
        self.qkv, self.out = (
            Linear(width, sum(self.sizes), precision),
            Linear(width, width, precision),
        )
        self.up, self.down = (
            Linear(width, 4 * width, precision),
            Linear(4 * width, width, precision),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = self.qkv(h).split(self.sizes, -1)
        q, k = turned(heads_of(q, self.heads), cos, sin), turned(k.unsqueeze(1), cos, sin)
        k, v = k.expand(q.shape).to(q.dtype), v.unsqueeze(1).expand(q.shape).to(q.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        away = self.down(F.gelu(self.up(h), approximate="tanh"))
        return x + dropout(self.out(merged(mixed)), self.rate) + dropout(away, self.rate)


class Falcon(nn.Module):  # type: ignore[misc]
    """A layer and the head, its loss with the sum of exponents held near one."""

    def __init__(self, width: int, heads: int, vocabulary: int, precision: str) -> None:
        super().__init__()
        self.layer = Beside(width, heads, 0.1, precision)
        self.norm, self.head = LayerNorm(width, precision), Linear(width, vocabulary, precision)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        logits = self.head(self.norm(self.layer(x, cos, sin))).float()
        total = torch.logsumexp(logits, -1)
        return (total - logits[..., 0]).mean() + 1e-4 * total.square().mean()


def falcon(chance: Random, precision: str) -> Made:
    """A layer of Falcon and its head."""
    width, heads = chance.choice(((512, 8), (1024, 16), (2048, 32), (2560, 32), (4544, 71)))
    batch, length = _tokens(chance, 2 * width)
    turns = [noise(1, 1, length, width // heads, precision=precision) for _ in range(2)]
    x = noise(batch, length, width, precision=precision, grad=True)
    model = Falcon(width, heads, chance.choice((5000, 32000, 51200)), precision)
    return model, (x, *turns), lambda y: y


class Selective(nn.Module):  # type: ignore[misc]
    """Mamba without its scan: a short filter, steps of its own for each place, a state, a gate."""

    def __init__(self, width: int, state: int, precision: str) -> None:
        super().__init__()
        n, self.state = 2 * width, state
        self.low = max(8, width // 16)
        self.norm, self.enter = RmsNorm(width, precision), Linear(width, 2 * n, precision, False)
        self.near = Along(n, n, 4, precision, groups=n, causal=True)
        self.tell = Linear(n, self.low + 2 * state, precision, False)
        self.step, self.out = Linear(self.low, n, precision), Linear(n, width, precision, False)
        self.rates = nn.Parameter(torch.empty(n, state))
        self.past = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.enter(self.norm(x)).chunk(2, -1)
        u = F.silu(self.near(u.transpose(1, 2))).transpose(1, 2)
        step, b, c = self.tell(u).split((self.low, self.state, self.state), -1)
        step = F.softplus(self.step(step)).float().unsqueeze(-1)
        kept = torch.exp(step * -torch.exp(self.rates))
        h = kept * 0.5 + step * b.float().unsqueeze(2) * u.float().unsqueeze(-1)
        y = (h * c.float().unsqueeze(2)).sum(-1) + u * self.past
        return x + self.out((y * F.silu(gate.float())).to(x.dtype))


def mamba(chance: Random, precision: str) -> Made:
    """A layer of Mamba."""
    width = chance.choice((192, 320, 384, 768, 1024, 1536))
    length = chance.choice((128, 197, 256, 512, 1024))
    batch = min(chance.choice((1, 2, 4, 8, 16)), max(1, (4 << 20) // (width * length)))
    x = noise(batch, length, width, precision=precision, grad=True)
    return Selective(width, chance.choice((8, 16)), precision), (x,), _square


class Quasi(nn.Module):  # type: ignore[misc]
    """QRNN: gates from a filter over time, then pooling step by step; zoneout keeps some states."""

    def __init__(self, width: int, precision: str) -> None:
        super().__init__()
        self.gates = Along(width, 3 * width, 2, precision, causal=True)
        self.update, self.new = (Linear(2 * width, width, precision) for _ in range(2))
        self.norm = LayerNorm(width, precision)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        z, f, o = self.gates(x.transpose(1, 2)).transpose(1, 2).chunk(3, -1)
        z, f, o = torch.tanh(z), 1 - dropout(1 - torch.sigmoid(f), 0.1), torch.sigmoid(o)
        outs, h = [], c
        for t in range(x.shape[1]):
            c = torch.lerp(z[:, t].float(), c.float(), f[:, t].float())
            h = h + torch.sigmoid(self.update(torch.cat((h, x[:, t]), -1)).to(h.dtype)) * (
                torch.tanh(self.new(torch.cat((h * 0.5, x[:, t]), -1)).to(h.dtype)) - h
            )
            outs.append(o[:, t] * c + h)
        return self.norm(torch.stack(outs, 1).to(x.dtype))


def qrnn(chance: Random, precision: str) -> Made:
    """Three steps of a quasi-recurrent layer and of a minimal gated unit."""
    width = chance.choice((192, 320, 512, 640, 1000, 1550))
    batch = chance.choice((20, 64, 128, 400, 1024, 3000))
    x = noise(batch, 3, width, precision=precision, grad=True)
    return Quasi(width, precision), (x, noise(batch, width, precision=precision)), _square


class Highway(nn.Module):  # type: ignore[misc]
    """Characters through filters of three widths, the most over time, two highway layers."""

    def __init__(self, width: int, characters: int, classes: int, precision: str) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(262, characters, dtype=stored(precision)))
        self.filters = nn.ModuleList([Along(characters, width, n, precision) for n in (3, 5, 7)])
        self.ways = nn.ModuleList([Linear(3 * width, 6 * width, precision) for _ in range(2)])
        self.end = Linear(3 * width, classes, precision)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.table).transpose(1, 2)
        y = torch.cat([torch.tanh(f(x)).amax(-1) for f in self.filters], -1)
        for way in self.ways:
            new, gate = way(y).chunk(2, -1)
            gate = torch.sigmoid(gate - 2.0)
            y = gate * F.relu(new) + (1 - gate) * y
        return self.end(dropout(y, 0.4))


def highway(chance: Random, precision: str) -> Made:
    """A character-level encoder of words."""
    width, characters = chance.choice((100, 192, 256, 320, 512)), chance.choice((16, 32, 50))
    ids = torch.zeros(chance.choice((100, 512, 700, 2048, 5000)), chance.choice((16, 32, 50)))
    model = Highway(width, characters, chance.choice((2, 400, 10000)), precision)
    return model, (ids.long(),), lambda y: entropy(precision, y)


FAR_TEXT: dict[str, Callable[[Random, str], Made]] = {
    "mpt": mpt,
    "falcon": falcon,
    "mamba": mamba,
    "qrnn": qrnn,
    "highway": highway,
}
