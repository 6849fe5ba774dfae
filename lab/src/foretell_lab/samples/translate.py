"""The Transformer (Vaswani et al. 2017) of PyTorch's own layers, an encoder and a decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretell_lab.samples.sample import Sample

_WIDTH, _HEADS, _INNER, _LAYERS, _WORDS, _DROP = 512, 8, 2048, 6, 37_000, 0.1


def transformer(batch: int = 64, length: int = 64) -> Sample:
    """The base model; both languages have as many words a sentence."""
    return pairs(Transformer, batch, (length, length))


def pairs(model: type[nn.Module], batch: int, lengths: tuple[int, int]) -> Sample:
    """A model that is given a source, a target and labels, and returns its loss."""

    def data() -> tuple[Tensor, Tensor, Tensor]:
        source, target = (torch.empty(batch, n, dtype=torch.int64) for n in lengths)
        return source, target, torch.empty_like(target)

    return Sample(model, data, None, "adam")


class Transformer(nn.Module):  # type: ignore[misc]
    """One matrix for the words of both languages and the logits; positions are fixed."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (_WIDTH, _HEADS, _INNER, _DROP)
        self.words, self.drop = nn.Embedding(_WORDS, _WIDTH), nn.Dropout(_DROP)
        self.encoder = nn.ModuleList(
            [nn.TransformerEncoderLayer(*sizes, batch_first=True) for _ in range(_LAYERS)]
        )
        self.decoder = nn.ModuleList(
            [nn.TransformerDecoderLayer(*sizes, batch_first=True) for _ in range(_LAYERS)]
        )

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        memory, x = self.drop(self.words(source)), self.drop(self.words(target))
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory, tgt_is_causal=True, tgt_mask=self._mask(x))
        logits = nn.functional.linear(x, self.words.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _mask(self, x: Tensor) -> Tensor:
        mask: Tensor = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return mask
