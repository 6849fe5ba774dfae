"""An optimizer a parameter, stepped as soon as its gradient is there."""

import torch
from torch import nn

net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizers = {p: torch.optim.Adam([p], foreach=False) for p in net.parameters()}


def update(p):
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in net.parameters():
    p.register_post_accumulate_grad_hook(update)
for _ in range(50):
    net(torch.randn(8, 16)).square().mean().backward()
