"""Experts chosen by the data: sizes depend on what the router says."""

import torch
from torch import nn

torch.manual_seed(0)


class Moe(nn.Module):
    def __init__(self, width=16, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            where = (chosen == k).nonzero(as_tuple=True)[0]
            if where.numel():
                out = out.index_add(0, where, expert(x[where]) * weight[where, None])
        return out


net = Moe()
optimizer = torch.optim.Adam(net.parameters())
for _ in range(50):
    optimizer.zero_grad()
    net(torch.randn(32, 16)).square().mean().backward()
    optimizer.step()
