"""DLRM (Naumov et al. 2019): tables of categories beside a network of numbers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from foretell_lab.samples.sample import Sample

_DENSE, _DIM = 13, 64
_BOTTOM, _TOP = (512, 256, 64), (1024, 1024, 512, 1)


def dlrm(batch: int = 2048, tables: int = 26, rows: int = 200_000) -> Sample:
    """A recommender with tables of one size."""

    def data() -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.empty(batch, tables, dtype=torch.int64)
        return torch.empty(batch, _DENSE), ids, torch.empty(batch)

    def loss(model: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        dense, ids, clicked = given
        return nn.functional.binary_cross_entropy_with_logits(model(dense, ids), clicked)

    return Sample(lambda: Dlrm(tables, rows), data, loss, "sgd")


def _network(widths: tuple[int, ...], last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, width in pairwise(widths):
        layers += [nn.Linear(wide, width), nn.ReLU(inplace=True)]
    return nn.Sequential(*(layers[:-1] if last else layers))


class Dlrm(nn.Module):  # type: ignore[misc]
    """Every pair of what stands for categories and numbers is multiplied."""

    def __init__(self, tables: int, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, _DIM) for _ in range(tables)])
        self.bottom = _network((_DENSE, *_BOTTOM), False)
        pairs = (tables + 1) * tables // 2
        self.top = _network((_DIM + pairs, *_TOP), True)
        self.pairs = tables + 1

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        stacked = torch.stack([x, *rows], 1)
        product = torch.bmm(stacked, stacked.transpose(1, 2))
        at = torch.tril_indices(self.pairs, self.pairs, -1, device=x.device)
        found: Tensor = self.top(torch.cat([x, product[:, at[0], at[1]]], 1))
        return found.squeeze(1)
