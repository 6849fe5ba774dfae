"""The network of `foretell.cost.fused`, on PyTorch Geometric, for training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import MultiAggregation
from torch_geometric.utils import scatter

from foretell.cost.fused import EDGE_FEATURES, NODE_FEATURES
from foretell.cost.fused_regions import WORDS

Tensor = Any


class Hear(MessagePassing):  # type: ignore[misc]
    """Mean and largest of the messages along edges in one direction."""

    def __init__(self, width: int, sent: int, flow: str) -> None:
        super().__init__(aggr=MultiAggregation(["mean", "max"]), flow=flow)
        self.send = nn.Linear(width, sent, bias=False)

    def forward(self, h: Tensor, edges: Tensor, edge_term: Tensor) -> Tensor:
        return self.propagate(edges, x=self.send(h), edge_term=edge_term, size=(len(h), len(h)))

    def message(self, x_j: Tensor, edge_term: Tensor) -> Tensor:
        return torch.relu(x_j + edge_term)


class Network(nn.Module):  # type: ignore[misc]
    """Layers of hearing both ways, pooling, and two dense layers."""

    def __init__(
        self, whole: int, width: int = 48, sent: int = 32, layers: int = 3, dense: int = 96,
        dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.op = nn.Parameter(0.3 * torch.randn(len(WORDS), 12))
        for name, size in (("node", NODE_FEATURES), ("whole", whole)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))
        self.enter = nn.Linear(12 + NODE_FEATURES, width)
        self.edge = nn.ModuleList(
            [nn.Linear(EDGE_FEATURES, sent, bias=False) for _ in range(layers)]
        )
        self.down = nn.ModuleList([Hear(width, sent, "source_to_target") for _ in range(layers)])
        self.up = nn.ModuleList([Hear(width, sent, "target_to_source") for _ in range(layers)])
        self.join = nn.ModuleList([nn.Linear(width + 4 * sent, width) for _ in range(layers)])
        self.first = nn.Linear(3 * width + whole, dense)
        self.second, self.out = nn.Linear(dense, dense // 2), nn.Linear(dense // 2, 2)
        self.rest = nn.Dropout(dropout)

    def scale(self, node: Tensor, whole: Tensor) -> None:
        """Remember the means and spreads of the training set."""
        for name, values in (("node", node), ("whole", whole)):
            getattr(self, f"{name}_mean").copy_(values.mean(0))
            getattr(self, f"{name}_std").copy_(values.std(0).clamp_min(0.05))

    def _scaled(self, name: str, values: Tensor) -> Tensor:
        mean, std = getattr(self, f"{name}_mean"), getattr(self, f"{name}_std")
        return ((values - mean) / std).clamp(-6.0, 6.0)

    def forward(
        self,
        op: Tensor,
        node: Tensor,
        edges: Tensor,
        edge_term: Tensor,
        whole: Tensor,
        batch: Tensor,
    ) -> Tensor:
        h = torch.relu(self.enter(torch.cat([self.op[op], self._scaled("node", node)], 1)))
        for edge, down, up, join in zip(self.edge, self.down, self.up, self.join, strict=True):
            e = edge(edge_term)
            h = h + torch.relu(join(torch.cat([h, down(h, edges, e), up(h, edges, e)], 1)))
        count = len(whole)
        total = scatter(h, batch, 0, count, "sum")
        pooled = [
            total / 10,
            scatter(h, batch, 0, count, "mean"),
            scatter(h, batch, 0, count, "max"),
        ]
        x = self.rest(torch.cat([*pooled, self._scaled("whole", whole)], 1))
        return self.out(self.rest(torch.relu(self.second(torch.relu(self.first(x))))))

    def exported(self) -> dict[str, Any]:
        """Weights under the names the numpy network asks for."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self._named().items()}

    @torch.no_grad()
    def begin_from(self, weights: Mapping[str, Any]) -> None:
        """Take weights over; features that came after them start at zero."""
        for name, mine in self._named().items():
            given = torch.tensor(weights[name], dtype=torch.float32, device=mine.device)
            mine[..., : given.shape[-1]] = given
            if name == "first.weight":
                mine[..., given.shape[-1] :] = 0.0

    def _named(self) -> dict[str, Any]:
        found = {"op": self.op}
        for name in ("node", "whole"):
            found |= {
                f"{name}.mean": getattr(self, f"{name}_mean"),
                f"{name}.std": getattr(self, f"{name}_std"),
            }
        for name in ("enter", "first", "second", "out"):
            layer = getattr(self, name)
            found |= {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}
        for i in range(len(self.join)):
            found |= {
                f"edge{i}.weight": self.edge[i].weight,
                f"down{i}.weight": self.down[i].send.weight,
            }
            found |= {f"up{i}.weight": self.up[i].send.weight}
            found |= {f"join{i}.weight": self.join[i].weight, f"join{i}.bias": self.join[i].bias}
        return found
