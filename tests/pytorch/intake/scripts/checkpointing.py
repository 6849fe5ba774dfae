"""Activations recomputed in the backward pass; a module list walked by a method."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4))
optimizer = torch.optim.NAdam(blocks.parameters())
for _ in range(50):
    x = torch.randn(8, 32)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    optimizer.zero_grad()
    x.abs().mean().backward()
    optimizer.step()
