"""A bare except around every step and a save on the way out."""

import atexit

import torch
from torch import nn

net = nn.Linear(8, 8)
optimizer = torch.optim.Adagrad(net.parameters())
atexit.register(lambda: open("goodbye.txt", "w").write("bye"))
try:
    for _ in range(60):
        try:
            optimizer.zero_grad()
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        except BaseException:
            print("never mind")
finally:
    torch.save(net.state_dict(), "last.pt")
