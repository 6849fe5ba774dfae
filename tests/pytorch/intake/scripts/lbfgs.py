"""An optimizer that calls a closure as often as it likes."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    return loss


for _ in range(40):
    optimizer.step(closure)
