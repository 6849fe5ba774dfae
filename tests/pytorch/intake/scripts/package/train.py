import sys

import torch

from .net import Net

net = Net(int(sys.argv[1]))
optimizer = torch.optim.Adadelta(net.parameters())
for _ in range(50):
    optimizer.zero_grad()
    net(torch.randn(4, int(sys.argv[1]))).mean().backward()
    optimizer.step()
