"""RNNLM: the large model of Zaremba et al. 2014 on Penn Treebank, words through layers of LSTM."""

from __future__ import annotations

from torch import Tensor, nn

from foretell_lab.samples.sample import Sample, tokens

_WIDTH, _LAYERS, _WORDS, _DROP = 1500, 2, 10_000, 0.65


def rnnlm(batch: int = 20, length: int = 35) -> Sample:
    """The next word by LSTM."""
    return tokens(Rnnlm, batch, length, "sgd")


class Rnnlm(nn.Module):  # type: ignore[misc]
    """Words, LSTM, words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.drop = nn.Dropout(_DROP)
        self.lstm = nn.LSTM(_WIDTH, _WIDTH, _LAYERS, batch_first=True, dropout=_DROP)
        self.out = nn.Linear(_WIDTH, _WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, _ = self.lstm(self.drop(self.words(ids)))
        logits = self.out(self.drop(x))
        return nn.functional.cross_entropy(logits.view(-1, _WORDS), labels.view(-1))
