"""Models of tokens: GPT-2, BERT, the Transformer, T5 and Llama."""

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
    half,
    noise,
    stored,
    wide,
)

Tensor = Any
Made = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]


def _tokens(chance: Random, width: int) -> tuple[int, int]:
    """Batch and length: people fill the device, so wider models get fewer tokens."""
    length = chance.choice((64, 128, 256, 384, 512, 1024, 2048, 197, 500, 1000))
    most = max(1, min(48 << 20, chance.choice((2 << 20, 8 << 20, 48 << 20))) // (width * length))
    return max(1, min(most, chance.choice((1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128)))), length


class Embedded(nn.Module):  # type: ignore[misc]
    """Token and position embeddings, then layers, then the head."""

    def __init__(
        self, vocabulary: int, length: int, width: int, precision: str, rate: float
    ) -> None:
        super().__init__()
        kind = stored(precision)
        self.tokens = nn.Parameter(torch.empty(vocabulary, width, dtype=kind))
        self.places = nn.Parameter(torch.empty(length, width, dtype=kind))
        self.rate = rate

    def embed(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = F.embedding(ids, self.tokens) + F.embedding(places, self.places)
        return dropout(x, self.rate)


def heads_of(x: Tensor, heads: int) -> Tensor:
    b, s, w = x.shape
    return x.view(b, s, heads, w // heads).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x.transpose(1, 2).reshape(b, s, h * d)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, precision: str, **extra: Any) -> Tensor:
    """Attention written out: scale, bias, mask, softmax, dropout."""
    scores = torch.matmul(*half(precision, q, k.transpose(-1, -2))) * q.shape[-1] ** -0.5
    if extra.get("bias") is not None:
        scores = scores + extra["bias"]
    if extra.get("causal"):
        n = scores.shape[-1]
        hidden = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    chosen = dropout(F.softmax(wide(precision, scores), -1), extra.get("rate", 0.0))
    return torch.matmul(*half(precision, chosen, v))


class Attention(nn.Module):  # type: ignore[misc]
    """Self-attention, by a library's kernel or written out."""

    def __init__(self, width: int, heads: int, precision: str, **extra: Any) -> None:
        super().__init__()
        self.qkv = Linear(width, 3 * width, precision)
        self.out = Linear(width, width, precision)
        self.heads, self.precision, self.extra = heads, precision, extra

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(x).chunk(3, -1))
        if self.extra.get("apart"):
            mixed = softmax_attention(q, k, v, self.precision, **self.extra)
        else:
            causal = bool(self.extra.get("causal"))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return dropout(self.out(merged(mixed)), self.extra.get("rate", 0.0))


class Layer(nn.Module):  # type: ignore[misc]
    """A transformer layer, norms before or after."""

    def __init__(
        self, width: int, heads: int, precision: str, act: str, *, before: bool, **extra: Any
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, precision, **extra)
        self.norms = nn.ModuleList([LayerNorm(width, precision) for _ in range(2)])
        self.up, self.down = (
            Linear(width, 4 * width, precision),
            Linear(4 * width, width, precision),
        )
        self.act, self.before, self.rate = _ACTS[act], before, extra.get("rate", 0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attention(self.norms[0](x))
            return x + dropout(self.down(self.act(self.up(self.norms[1](x)))), self.rate)
        x = self.norms[0](x + self.attention(x))
        return self.norms[1](x + dropout(self.down(self.act(self.up(x))), self.rate))


_ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    # as GPT-2 first wrote it
    "gelu_new": lambda x: 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * x.pow(3)))),
}


class Stack(Embedded):
    """Embeddings, two layers, a norm and a head."""

    def __init__(self, sizes: tuple[int, ...], precision: str, act: str, **extra: Any) -> None:
        vocabulary, length, width, heads = sizes
        super().__init__(vocabulary, length, width, precision, extra.get("rate", 0.0))
        self.layers = nn.ModuleList(
            [Layer(width, heads, precision, act, **extra) for _ in range(2)]
        )
        self.norm, self.head = (
            LayerNorm(width, precision),
            Linear(width, vocabulary, precision, False),
        )
        self.first = not extra["before"]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(x) if self.first else x
        for layer in self.layers:
            x = layer(x)
        return self.head(x if self.first else self.norm(x))


def _stacked(chance: Random, precision: str, vocabulary: int, act: str, **extra: Any) -> Made:
    width = chance.choice((512, 640, 768, 1024, 1280, 1600, 2048, 2560))
    batch, length = _tokens(chance, width)
    model = Stack((vocabulary, length, width, width // 64), precision, act, **extra)
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return model, (ids,), lambda logits: entropy(precision, logits)


def gpt2(chance: Random, precision: str) -> Made:
    """GPT-2: norms first, tanh GELU, causal."""
    extra = {"before": True, "causal": True, "rate": chance.choice((0.0, 0.1))}
    act = chance.choice(("gelu_tanh", "gelu_new"))
    apart = chance.random() < 0.3
    return _stacked(chance, precision, chance.choice((50257, 50304)), act, apart=apart, **extra)


def bert(chance: Random, precision: str) -> Made:
    """BERT: norms last, GELU, dropout."""
    extra = {"before": False, "rate": 0.1, "apart": chance.random() < 0.6}
    return _stacked(chance, precision, 30522, "gelu", **extra)


def transformer(chance: Random, precision: str) -> Made:
    """The encoder of the Transformer: norms last, ReLU, attention written out."""
    extra = {"before": False, "rate": 0.1, "apart": True}
    return _stacked(chance, precision, chance.choice((32000, 37000)), "relu", **extra)


class T5Layer(nn.Module):  # type: ignore[misc]
    """T5: root-mean-square norms, a bias on positions, gated GELU or ReLU."""

    def __init__(self, width: int, heads: int, length: int, precision: str, gated: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([RmsNorm(width, precision) for _ in range(2)])
        self.attention = Attention(width, heads, precision, apart=True, rate=0.1)
        kind = stored(precision)
        self.places = nn.Parameter(torch.empty(1, heads, length, length, dtype=kind))
        self.up = Linear(width, 4 * width, precision, False)
        self.gate = Linear(width, 4 * width, precision, False) if gated else None
        self.down = Linear(4 * width, width, precision, False)

    def forward(self, x: Tensor) -> Tensor:
        self.attention.extra["bias"] = self.places
        x = x + self.attention(self.norms[0](x))
        h = self.norms[1](x)
        up = self.up(h)
        h = F.gelu(self.gate(h), approximate="tanh") * up if self.gate is not None else F.relu(up)
        return x + dropout(self.down(dropout(h, 0.1)), 0.1)


def t5(chance: Random, precision: str) -> Made:
    """Two layers of T5."""
    width = chance.choice((512, 768, 1024, 2048))
    batch, length = _tokens(chance, width)
    length = min(length, 1024)
    gated = chance.random() < 0.6
    layers = [T5Layer(width, width // 64, length, precision, gated) for _ in range(2)]
    x = noise(batch, length, width, precision=precision, grad=True)
    return nn.Sequential(*layers), (x,), lambda y: (y.float() ** 2).mean()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, as Llama's code writes it."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class LlamaLayer(nn.Module):  # type: ignore[misc]
    """Llama: rotary positions, grouped heads, SwiGLU."""

    def __init__(self, sizes: tuple[int, ...], precision: str) -> None:
        super().__init__()
        width, self.heads, self.groups, inner = sizes
        each = width // self.heads
        self.norms = nn.ModuleList([RmsNorm(width, precision) for _ in range(2)])
        self.q = Linear(width, width, precision, False)
        self.k, self.v = (Linear(width, self.groups * each, precision, False) for _ in range(2))
        self.out = Linear(width, width, precision, False)
        self.up, self.gate = (Linear(width, inner, precision, False) for _ in range(2))
        self.down = Linear(inner, width, precision, False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k = heads_of(self.q(h), self.heads), heads_of(self.k(h), self.groups)
        v, many = heads_of(self.v(h), self.groups), self.heads // self.groups
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (t.repeat_interleave(many, 1) if many > 1 else t for t in (k, v))
        x = x + self.out(
            merged(F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True))
        )
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(Embedded):
    """Two layers of Llama with embeddings and head."""

    def __init__(self, sizes: tuple[int, ...], vocabulary: int, precision: str) -> None:
        super().__init__(vocabulary, 1, sizes[0], precision, 0.0)
        self.layers = nn.ModuleList([LlamaLayer(sizes, precision) for _ in range(2)])
        self.norm = RmsNorm(sizes[0], precision)
        self.head = Linear(sizes[0], vocabulary, precision, False)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = F.embedding(ids, self.tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def llama(chance: Random, precision: str) -> Made:
    """Two layers of Llama."""
    width, heads, groups, inner, vocabulary = chance.choice(
        ((2048, 32, 4, 5632, 32000), (4096, 32, 32, 11008, 32000), (4096, 32, 8, 14336, 128256),
         (3072, 24, 8, 8192, 128256), (2048, 16, 16, 5504, 32000), (5120, 40, 40, 13824, 32000))
    )  # fmt: skip
    batch, length = _tokens(chance, width)
    model = Llama((width, heads, groups, inner), vocabulary, precision)
    each = width // heads
    turns = [noise(1, 1, length, each, precision=precision) for _ in range(2)]
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return model, (ids, *turns), lambda logits: entropy(precision, logits)


TEXT: dict[str, Callable[[Random, str], Made]] = {
    "gpt2": gpt2,
    "bert": bert,
    "transformer": transformer,
    "t5": t5,
    "llama": llama,
}
