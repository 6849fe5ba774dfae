"""A script in a folder of its own that imports what is beside it."""

import torch
from lib.data import batches
from torch import nn

net = nn.Sequential(nn.Conv1d(1, 8, 5), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.LazyLinear(3))
net(torch.randn(1, 1, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, nesterov=True, momentum=0.9)
for x, y in batches(50):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
