"""More models of tokens: GPT-NeoX, Gemma and a language model of GRU cells.

They widen what is trained on by rotary positions, norms on both sides and gates. None of them is a
model kept out of training; each shares building blocks with many.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foretell_lab.fused.models.parts import (
    LayerNorm,
    Linear,
    RmsNorm,
    dropout,
    entropy,
    noise,
    stored,
)
from foretell_lab.fused.models.text import (
    Embedded,
    Made,
    _tokens,
    heads_of,
    merged,
    turned,
)

Tensor = Any


class NeoxLayer(nn.Module):  # type: ignore[misc]
    """GPT-NeoX: a quarter of each head is turned, attention and layers side by side."""

    def __init__(self, width: int, heads: int, precision: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm(width, precision) for _ in range(2)])
        self.qkv, self.out = Linear(width, 3 * width, precision), Linear(width, width, precision)
        self.up, self.down = (
            Linear(width, 4 * width, precision),
            Linear(4 * width, width, precision),
        )
        self.heads = heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(h).chunk(3, -1))
        n = cos.shape[-1]
        q, k = (torch.cat((turned(t[..., :n], cos, sin), t[..., n:]), -1) for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        return x + self.out(merged(mixed)) + self.down(F.gelu(self.up(self.norms[1](x))))


class Neox(Embedded):
    """Two layers with embeddings and head."""

    def __init__(self, width: int, heads: int, precision: str) -> None:
        super().__init__(50432, 1, width, precision, 0.0)
        self.layers = nn.ModuleList([NeoxLayer(width, heads, precision) for _ in range(2)])
        self.norm, self.head = LayerNorm(width, precision), Linear(width, 50432, precision, False)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = F.embedding(ids, self.tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def neox(chance: Random, precision: str) -> Made:
    """Two layers of GPT-NeoX."""
    width, heads = chance.choice(((768, 12), (1024, 16), (2048, 16), (2560, 32), (4096, 32)))
    batch, length = _tokens(chance, width)
    turns = [noise(1, 1, length, width // heads // 4, precision=precision) for _ in range(2)]
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return Neox(width, heads, precision), (ids, *turns), lambda y: entropy(precision, y)


class GemmaLayer(nn.Module):  # type: ignore[misc]
    """Gemma: norms on both sides, gated GELU, shared keys, positions turned."""

    def __init__(self, sizes: tuple[int, ...], precision: str) -> None:
        super().__init__()
        width, self.heads, self.groups, each, inner = sizes
        self.norms = nn.ModuleList([RmsNorm(width, precision) for _ in range(4)])
        self.q = Linear(width, self.heads * each, precision, False)
        self.k, self.v = (Linear(width, self.groups * each, precision, False) for _ in range(2))
        self.out = Linear(self.heads * each, width, precision, False)
        self.up, self.gate = (Linear(width, inner, precision, False) for _ in range(2))
        self.down = Linear(inner, width, precision, False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h, many = self.norms[0](x), self.heads // self.groups
        q, k = heads_of(self.q(h), self.heads), heads_of(self.k(h), self.groups)
        v = heads_of(self.v(h), self.groups)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (t.repeat_interleave(many, 1) if many > 1 else t for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        x = x + self.norms[1](self.out(merged(mixed)))
        h = self.norms[2](x)
        h = self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))
        return x + self.norms[3](h)


class Gemma(Embedded):
    """Two layers; embeddings are scaled, logits softly capped."""

    def __init__(self, sizes: tuple[int, ...], precision: str) -> None:
        super().__init__(32768, 1, sizes[0], precision, 0.0)
        self.layers = nn.ModuleList([GemmaLayer(sizes, precision) for _ in range(2)])
        self.norm, self.head = (
            RmsNorm(sizes[0], precision),
            Linear(sizes[0], 32768, precision, False),
        )

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = F.embedding(ids, self.tokens) * self.tokens.shape[1] ** 0.5
        for layer in self.layers:
            x = layer(x, cos, sin)
        return 30.0 * torch.tanh(self.head(self.norm(x)) / 30.0)


def gemma(chance: Random, precision: str) -> Made:
    """Two layers of Gemma."""
    sizes = chance.choice(
        ((640, 4, 1, 256, 2048), (1152, 4, 1, 256, 6912), (2304, 8, 4, 256, 9216),
         (3584, 16, 8, 256, 14336), (2560, 8, 4, 256, 10240))
    )  # fmt: skip
    batch, length = _tokens(chance, sizes[0])
    turns = [noise(1, 1, length, sizes[3], precision=precision) for _ in range(2)]
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return Gemma(sizes, precision), (ids, *turns), lambda y: entropy(precision, y)


class Gru(nn.Module):  # type: ignore[misc]
    """A language model of GRU cells, written out over a few steps."""

    def __init__(self, vocabulary: int, width: int, precision: str) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(vocabulary, width, dtype=stored(precision)))
        self.enter, self.again = (Linear(width, 3 * width, precision) for _ in range(2))
        self.head = Linear(width, vocabulary, precision)

    def forward(self, ids: Tensor, h: Tensor) -> Tensor:
        x = dropout(F.embedding(ids, self.tokens), 0.3)
        outs = []
        for t in range(x.shape[1]):
            a, b = self.enter(x[:, t]).chunk(3, 1), self.again(h).chunk(3, 1)
            reset, update = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
            new = torch.tanh(a[2] + reset * b[2])
            h = (1 - update) * new + update * h
            outs.append(h)
        return self.head(dropout(torch.stack(outs, 1), 0.3))


def gru(chance: Random, precision: str) -> Made:
    """Three steps of a GRU language model."""
    width = chance.choice((256, 500, 620, 800, 1024, 1200, 1600, 2400))
    batch = chance.choice((16, 32, 64, 100, 256, 640, 1024))
    ids, h = torch.zeros(batch, 3, dtype=torch.int64), noise(batch, width, precision=precision)
    model = Gru(chance.choice((8000, 20000, 30000)), width, precision)
    return model, (ids, h), lambda y: entropy(precision, y)


MORE_TEXT: dict[str, Callable[[Random, str], Made]] = {
    "neox": neox,
    "gemma": gemma,
    "gru": gru,
}
