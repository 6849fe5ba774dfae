"""Models of PyTorch Geometric on one random graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pytorch.zoo.case import Case


class Net(nn.Module):
    """Two layers of one kind, and the loss of all nodes."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        import torch_geometric.nn as layers

        make = getattr(layers, kind)
        if kind == "GINConv":
            make = lambda i, o: layers.GINConv(nn.Sequential(nn.Linear(i, o), nn.ReLU()))  # noqa: E731
        self.a, self.b = make(16, 32, **options), make(32, 5, **options)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.b(F.relu(self.a(x, edges)), edges), y)


def batch() -> tuple[Tensor, ...]:
    return torch.randn(60, 16), torch.randint(0, 60, (2, 200)), torch.randint(0, 5, (60,))


def loss(model: nn.Module, given: Any) -> Tensor:
    found: Tensor = model(*given)
    return found


CASES = [
    Case(f"pyg-{kind}", partial(Net, kind, **options), batch, loss)
    for kind, options in {
        "GCNConv": {}, "GATConv": {}, "SAGEConv": {}, "GINConv": {},
        "TransformerConv": {}, "GraphConv": {},
    }.items()
]  # fmt: skip
