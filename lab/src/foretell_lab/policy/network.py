"""The network of `foretell.search.placement.policy`, on PyTorch Geometric, for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch_geometric.nn import GATv2Conv, HeteroConv, MessagePassing

Tensor = Any
WIDTH, HEADS, LAYERS = 32, 4, 2
# (source, name, target) of each kind of edge
BEFORE, BEHIND = ("group", "before", "group"), ("group", "behind", "group")
SERVE, PLACE, LINK = (
    ("cell", "serve", "group"),
    ("group", "place", "cell"),
    ("cell", "link", "cell"),
)
CHAIN, ATTENDING = (BEFORE, BEHIND), (SERVE, PLACE, LINK)


class Hear(MessagePassing):  # type: ignore[misc]
    """A neighbour's message with what is known of the edge."""

    def __init__(self, width: int, edge: int) -> None:
        super().__init__(aggr="add")
        self.left, self.edge = nn.Linear(width, width), nn.Linear(edge, width, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        nodes = x[1] if isinstance(x, tuple) else x
        size = (len(nodes), len(nodes))
        return self.propagate(
            edge_index, x=self.left(nodes), edge_term=self.edge(edge_attr), size=size
        )

    def message(self, x_j: Tensor, edge_term: Tensor) -> Tensor:
        return torch.relu(x_j + edge_term)


@dataclass(frozen=True)
class Batch:
    """Several questions as one graph."""

    nodes: dict[str, Tensor]
    edges: dict[tuple[str, str, str], Tensor]
    edge_term: dict[tuple[str, str, str], Tensor]
    way_on: Tensor  # [k, ·] of all questions
    changed: tuple[Tensor, Tensor, Tensor]  # way on, group, weight
    to: tuple[Tensor, Tensor, Tensor]
    come_from: tuple[Tensor, Tensor, Tensor]
    question: Tensor  # [k] which question a way on is of


class Network(nn.Module):  # type: ignore[misc]
    """Layers of hearing along five kinds of edge, then a score for every way on."""

    def __init__(self, widths: dict[str, int], width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.group, self.cell = nn.Linear(widths["group"], width), nn.Linear(widths["cell"], width)
        self.layers = nn.ModuleList([_layer(widths, width) for _ in range(layers)])
        self.first = nn.Linear(3 * width + widths["way_on"], 2 * width)
        self.second, self.score = nn.Linear(2 * width, width), nn.Linear(width, 1)
        self.plain = nn.Linear(widths["way_on"], 1)

    def forward(self, batch: Batch) -> Tensor:
        """A score for every way on."""
        x = {
            "group": torch.tanh(self.group(batch.nodes["group"])),
            "cell": torch.tanh(self.cell(batch.nodes["cell"])),
        }
        for layer in self.layers:
            heard = layer(x, batch.edges, edge_attr_dict=batch.edge_term)
            x = {name: x[name] + torch.relu(heard[name]) for name in x}
        count = len(batch.way_on)
        parts = [
            _weighed(x["group"], batch.changed, count),
            _weighed(x["cell"], batch.to, count),
            _weighed(x["cell"], batch.come_from, count),
            batch.way_on,
        ]
        hidden = torch.relu(self.second(torch.relu(self.first(torch.cat(parts, 1)))))
        return (self.score(hidden) + self.plain(batch.way_on))[:, 0]

    def exported(self) -> dict[str, Any]:
        """Weights under the names the numpy network asks for."""
        found: dict[str, Tensor] = {}
        for name in ("group", "cell", "first", "second", "score", "plain"):
            found |= _dense(name, getattr(self, name))
        for i, layer in enumerate(self.layers):
            for kind in CHAIN:
                hear = layer.convs[kind]
                found |= _dense(f"{i}.{kind[1]}.left", hear.left)
                found[f"{i}.{kind[1]}.edge.weight"] = hear.edge.weight
            for kind in ATTENDING:
                found |= _attending(f"{i}.{kind[1]}", layer.convs[kind])
        return {name: value.detach().numpy().copy() for name, value in found.items()}


def _layer(widths: dict[str, int], width: int) -> HeteroConv:
    """What is heard along all kinds of edge is added up."""
    edge = {SERVE: widths["place"], PLACE: widths["place"], LINK: widths["link"]}
    found: dict[Any, Any] = {kind: Hear(width, widths["next"]) for kind in CHAIN}
    for kind in ATTENDING:
        found[kind] = GATv2Conv(
            (width, width), width // HEADS, HEADS, edge_dim=edge[kind], add_self_loops=False
        )
    return HeteroConv(found, aggr="sum")


def _weighed(x: Tensor, pairs: tuple[Tensor, Tensor, Tensor], count: int) -> Tensor:
    to, of, weight = pairs
    out = torch.zeros(count, x.shape[1], dtype=x.dtype)
    return out.index_add(0, to, x[of] * weight[:, None])


def _dense(name: str, layer: Any) -> dict[str, Tensor]:
    return {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}


def _attending(name: str, conv: Any) -> dict[str, Tensor]:
    return {
        **_dense(f"{name}.left", conv.lin_l),
        **_dense(f"{name}.right", conv.lin_r),
        f"{name}.edge.weight": conv.lin_edge.weight,
        f"{name}.attention": conv.att[0],
        f"{name}.bias": conv.bias,
    }


def batch(seen: Sequence[Any]) -> Batch:
    """Questions of any sizes as one graph; each has the fields of `policy.view.Seen`."""
    groups, cells, ways = (
        np.cumsum([0, *(len(getattr(one, name)) for one in seen)])
        for name in ("group", "cell", "way_on")
    )
    edges: dict[tuple[str, str, str], list[Any]] = {k: [] for k in (*CHAIN, *ATTENDING)}
    for i, one in enumerate(seen):
        for kind, ends in _edges(one, groups[i], cells[i]).items():
            edges[kind].append(ends)
    chain = _joined([one.next for one in seen])
    place = [one.place.reshape(-1, one.place.shape[2]) for one in seen]
    edge_term = {BEFORE: chain, BEHIND: chain, SERVE: _joined(place), PLACE: _joined(place)}
    edge_term[LINK] = _joined([one.link.reshape(-1, one.link.shape[2]) for one in seen])
    return Batch(
        {name: _joined([getattr(one, name) for one in seen]) for name in ("group", "cell")},
        {kind: torch.tensor(np.concatenate(ends, axis=1)) for kind, ends in edges.items()},
        edge_term,
        _joined([one.way_on for one in seen]),
        _pairs([one.changed for one in seen], ways, groups),
        _pairs([one.to for one in seen], ways, cells),
        _pairs([one.come_from for one in seen], ways, cells),
        torch.tensor(np.repeat(np.arange(len(seen)), np.diff(ways))),
    )


def _edges(one: Any, g0: int, c0: int) -> dict[tuple[str, str, str], Any]:
    """[source, target] of every edge of one question."""
    groups, cells = len(one.group), len(one.cell)
    g, c = g0 + np.arange(groups), c0 + np.arange(cells)
    grid = np.stack([np.repeat(g, cells), np.tile(c, groups)])
    around = np.stack([np.repeat(c, cells), np.tile(c, cells)])
    chain = g[one.ends.T]
    return {BEFORE: chain, BEHIND: chain[::-1], SERVE: grid[::-1], PLACE: grid, LINK: around}


def _pairs(weights: list[Any], ways: Any, nodes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What is not zero of some [way on, node] weights, numbered through."""
    parts = [np.nonzero(w) for w in weights]
    rows = np.concatenate([r + ways[i] for i, (r, _) in enumerate(parts)])
    cols = np.concatenate([c + nodes[i] for i, (_, c) in enumerate(parts)])
    values = np.concatenate([w[p] for w, p in zip(weights, parts, strict=True)])
    return torch.tensor(rows), torch.tensor(cols), torch.tensor(values, dtype=torch.float32)


def _joined(parts: list[Any]) -> Tensor:
    return torch.tensor(np.concatenate(parts), dtype=torch.float32)
