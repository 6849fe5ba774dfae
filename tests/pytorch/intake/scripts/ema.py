"""A second copy of the model that follows slowly, and a teacher that is never trained."""

import copy

import torch
from torch import nn

net = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
slow = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.1)
for _ in range(50):
    x = torch.randn(8, 16)
    with torch.no_grad():
        target = slow(x)
    loss = nn.functional.mse_loss(net(x + 0.1 * torch.randn_like(x)), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for old, new in zip(slow.parameters(), net.parameters()):
            old.lerp_(new, 0.01)
