"""T5 small (Raffel et al. 2019), as Hugging Face writes it: scores spelled out, with a bias."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretell_lab.samples.sample import Sample
from foretell_lab.samples.translate import pairs

_WIDTH, _HEADS, _INNER, _LAYERS, _WORDS, _DROP, _BUCKETS = 512, 8, 2048, 6, 32_128, 0.1, 32


def t5_small(batch: int = 8, length: int = 512, target: int = 114) -> Sample:
    """T5 small."""
    return pairs(T5, batch, (length, target))


class Attention(nn.Module):  # type: ignore[misc]
    """Queries of one side, keys and values of the other; nothing scales the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(_DROP)
        self.q, self.k, self.v, self.o = (nn.Linear(_WIDTH, _WIDTH, False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (
            f(y).view(*y.shape[:2], _HEADS, -1).transpose(1, 2)
            for f, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = torch.matmul(q, k.transpose(2, 3))
        if bias is not None:
            scores += bias
        mixed = torch.matmul(self.drop(torch.softmax(scores, -1)), v)
        found: Tensor = self.o(mixed.transpose(1, 2).reshape(x.shape))
        return found


class Block(nn.Module):  # type: ignore[misc]
    """Attends to itself, perhaps to what the encoder made, and thinks."""

    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.own, self.cross = Attention(), Attention() if crosses else None
        self.norms = nn.ModuleList([nn.RMSNorm(_WIDTH) for _ in range(2 + crosses)])
        self.up, self.down = nn.Linear(_WIDTH, _INNER, False), nn.Linear(_INNER, _WIDTH, False)
        self.drop = nn.Dropout(_DROP)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.drop(self.own(y, y, bias))
        if self.cross is not None:
            x = x + self.drop(self.cross(self.norms[1](x), memory, None))
        inner = torch.relu(self.up(self.norms[-1](x)))
        return x + self.drop(self.down(inner))


class T5(nn.Module):  # type: ignore[misc]
    """Words of one sort in, words of the same out; one matrix for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(_WORDS, _WIDTH), nn.Dropout(_DROP)
        self.encoder = nn.ModuleList([Block(False) for _ in range(_LAYERS)])
        self.decoder = nn.ModuleList([Block(True) for _ in range(_LAYERS)])
        self.norms = nn.ModuleList([nn.RMSNorm(_WIDTH) for _ in range(2)])
        self.places = nn.ModuleList([nn.Embedding(_BUCKETS, _HEADS) for _ in range(2)])

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory = self._side(0, self.encoder, source, None)
        x = self._side(1, self.decoder, target, memory)
        logits = nn.functional.linear(x, self.words.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _side(self, side: int, blocks: nn.ModuleList, ids: Tensor, memory: Tensor | None) -> Tensor:
        x, bias = self.drop(self.words(ids)), self._bias(side, ids)
        for block in blocks:
            x = block(x, bias, memory)
        found: Tensor = self.norms[side](x)
        return found

    def _bias(self, side: int, ids: Tensor) -> Tensor:
        """A number for each distance and head, and a mask where words are to come."""
        length = ids.shape[1]
        at = torch.arange(length, device=ids.device)
        near = (at[:, None] - at[None, :]).abs().clamp(max=_BUCKETS - 1)
        bias: Tensor = self.places[side](near).permute(2, 0, 1)[None]
        mask = torch.full((length, length), -1e9, device=ids.device).triu(1)
        return bias + mask if side else bias
