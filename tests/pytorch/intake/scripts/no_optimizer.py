"""Weights changed by hand."""

import torch
from torch import nn

net = nn.Linear(8, 1)
for _ in range(50):
    x = torch.randn(16, 8)
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.01 * p.grad
            p.grad = None
