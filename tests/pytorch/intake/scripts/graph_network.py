"""Message passing over batches of graphs of different sizes, in plain PyTorch."""

import random

import torch
import torch.nn.functional as F
from torch import nn


class Convolution(nn.Module):
    def __init__(self, inner, out):
        super().__init__()
        self.own, self.near = nn.Linear(inner, out), nn.Linear(inner, out, bias=False)

    def forward(self, x, edges):
        source, target = edges
        gathered = torch.zeros(len(x), x.shape[1]).to(x).index_add(0, target, x[source])
        return self.own(x) + self.near(gathered)


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList(
            [Convolution(8, width), *(Convolution(width, width) for _ in range(2))]
        )
        self.out = nn.Linear(width, 1)

    def forward(self, x, edges, graph, many):
        for layer in self.layers:
            x = F.relu(layer(x, edges))
        return self.out(x.new_zeros(many, x.shape[1]).index_add(0, graph, x)).squeeze(-1)


def batch(many=8):
    nodes, pairs, owners, begin = [], [], [], 0
    for k in range(many):
        size = random.randint(4, 12)
        nodes.append(torch.randn(size, 8))
        pairs.append(torch.randint(0, size, (2, 3 * size)) + begin)
        owners.append(torch.full((size,), k))
        begin += size
    return torch.cat(nodes), torch.cat(pairs, 1), torch.cat(owners), torch.randn(many)


net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(60):
    x, edges, graph, target = batch()
    loss = F.l1_loss(net(x, edges, graph, len(target)), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
