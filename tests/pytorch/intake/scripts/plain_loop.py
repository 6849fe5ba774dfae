"""A loop at the top level of a file, nothing else."""

import torch
from torch import nn

net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(60):
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    loss = nn.functional.cross_entropy(net(x), y)
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    if step % 10 == 0:
        print(step, loss.item())
