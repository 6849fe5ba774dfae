"""GPT-2 (Radford et al. 2019), BERT (Devlin et al. 2018) and Llama (Touvron et al. 2023).

They return their loss, as the models of Hugging Face do when they are given labels.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell_lab.samples.sample import Sample, tokens

_WIDTH, _HEADS, _LAYERS, _DROP = 768, 12, 12, 0.1  # of GPT-2 small and BERT base
# Layers, width, heads, key heads, inner width, vocabulary.
_LLAMAS = {
    "7b": (32, 4096, 32, 32, 11008, 32000),  # Llama 2, table 1 and its model card
    "8b": (32, 4096, 32, 8, 14336, 128256),  # Llama 3, table 3
    "70b": (80, 8192, 64, 8, 28672, 128256),
}


def gpt2(batch: int = 8, length: int = 512) -> Sample:
    """GPT-2 small."""
    return tokens(Gpt2, batch, length, "adam")


def bert(batch: int = 32, length: int = 128) -> Sample:
    """BERT base with its masked-token head."""
    return tokens(Bert, batch, length, "adam")


def llama(batch: int = 1, length: int = 4096, size: str = "7b") -> Sample:
    """A Llama: rotary positions, grouped heads, gated perceptron."""
    return tokens(partial(Llama, *_LLAMAS[size]), batch, length, "adamw")


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


class Conv1D(nn.Module):  # type: ignore[misc]
    """A linear layer whose weight is stored input first, as GPT-2 was released."""

    def __init__(self, wide_in: int, wide: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(wide_in, wide)),
            nn.Parameter(torch.empty(wide)),
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


def new_gelu(x: Tensor) -> Tensor:
    """The approximation of gelu that GPT-2 was trained with, step by step."""
    return (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    )


class Gpt2Block(nn.Module):  # type: ignore[misc]
    """Normalise, attend, add; normalise, think, add."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attn, self.proj = Conv1D(_WIDTH, 3 * _WIDTH), Conv1D(_WIDTH, _WIDTH)
        self.up, self.down = Conv1D(_WIDTH, 4 * _WIDTH), Conv1D(4 * _WIDTH, _WIDTH)
        self.drop = nn.Dropout(_DROP)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(t, _HEADS) for t in self.attn(self.ln_1(x)).split(_WIDTH, dim=2))
        rate = _DROP if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(*x.shape)
        x = self.drop(self.proj(mixed)) + x
        found: Tensor = x + self.drop(self.down(new_gelu(self.up(self.ln_2(x)))))
        return found


class Gpt2(nn.Module):  # type: ignore[misc]
    """GPT-2 small; the embedding is also the output layer."""

    def __init__(self, vocabulary: int = 50257, positions: int = 1024) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, _WIDTH), nn.Embedding(positions, _WIDTH)
        self.drop, self.ln_f = nn.Dropout(_DROP), nn.LayerNorm(_WIDTH)
        self.h = nn.ModuleList(Gpt2Block() for _ in range(_LAYERS))
        self.lm_head = nn.Linear(_WIDTH, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = self.drop(self.wte(ids) + self.wpe(place))
        for block in self.h:
            x = block(x)
        return next_token_loss(self.lm_head(self.ln_f(x)), labels)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in fp32 of each token given those before it."""
    logits = logits.float()
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), shifted.view(-1))


class BertBlock(nn.Module):  # type: ignore[misc]
    """Attend, add, normalise; think, add, normalise."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.value, self.proj = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.act, self.drop = nn.GELU(), nn.Dropout(_DROP)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(f(x), _HEADS) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=_DROP if self.training else 0.0)
        mixed = mixed.transpose(1, 2).reshape(*x.shape)
        x = self.norm1(self.drop(self.proj(mixed)) + x)
        found: Tensor = self.norm2(self.drop(self.down(self.act(self.up(x)))) + x)
        return found


class Bert(nn.Module):  # type: ignore[misc]
    """BERT base; the embedding is also the output layer."""

    def __init__(self, vocabulary: int = 30522, positions: int = 512) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, _WIDTH, padding_idx=0)
        self.places, self.kinds = nn.Embedding(positions, _WIDTH), nn.Embedding(2, _WIDTH)
        self.norm, self.drop = nn.LayerNorm(_WIDTH), nn.Dropout(_DROP)
        self.layers = nn.ModuleList(BertBlock() for _ in range(_LAYERS))
        self.transform, self.act = nn.Linear(_WIDTH, _WIDTH), nn.GELU()
        self.head_norm, self.decoder = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, vocabulary)
        self.decoder.weight = self.words.weight
        self.register_buffer("place_ids", torch.arange(positions).unsqueeze(0))
        self.register_buffer("kind_ids", torch.zeros(1, positions, dtype=torch.int64))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        places = self.place_ids[:, : ids.shape[1]]
        kinds = self.kind_ids[:, : ids.shape[1]].expand(*ids.shape)
        x = self.words(ids) + self.kinds(kinds) + self.places(places)
        x = self.drop(self.norm(x))
        for layer in self.layers:
            x = layer(x)
        logits = self.decoder(self.head_norm(self.act(self.transform(x))))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class RmsNorm(nn.Module):  # type: ignore[misc]
    """Scales each token to unit mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A head's halves rotated by the token's place."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaBlock(nn.Module):  # type: ignore[misc]
    """Normalise, attend, add; normalise, gate, add."""

    def __init__(self, width: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        keys = width // heads * key_heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q_proj, self.o_proj = nn.Linear(width, width, False), nn.Linear(width, width, False)
        self.k_proj, self.v_proj = nn.Linear(width, keys, False), nn.Linear(width, keys, False)
        self.gate_proj, self.up_proj = (
            nn.Linear(width, inner, False),
            nn.Linear(width, inner, False),
        )
        self.down_proj = nn.Linear(inner, width, False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q = _turned(_heads(self.q_proj(y), self.heads), cos, sin)
        k = _turned(_heads(self.k_proj(y), self.key_heads), cos, sin)
        v = _heads(self.v_proj(y), self.key_heads)
        shared = self.heads != self.key_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(*x.shape))
        return x + self.think(self.norm2(x))

    def think(self, x: Tensor) -> Tensor:
        """What each token does by itself."""
        found: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class Llama(nn.Module):  # type: ignore[misc]
    """A decoder of Llama blocks, its weights in bf16."""

    block = LlamaBlock

    def __init__(
        self, layers: int, width: int, heads: int, key_heads: int, inner: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            self.block(width, heads, key_heads, inner) for _ in range(layers)
        )
        self.norm, self.lm_head = RmsNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.depth = width // heads
        self.to(torch.bfloat16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        cos, sin = self._places(ids, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return next_token_loss(self.lm_head(self.norm(x)), labels)

    def _places(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.depth, 2, device=ids.device, dtype=torch.float32)
        angle = torch.outer(
            torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32),
            1.0 / 10000.0 ** (half / self.depth),
        )
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().to(dtype), angle.sin().to(dtype)
