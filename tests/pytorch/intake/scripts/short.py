"""Ends after ten steps."""

import torch

net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(10):
    optimizer.zero_grad()
    net(torch.randn(4, 8)).mean().backward()
    optimizer.step()
