"""An optimizer of one's own and parameters in groups; weights kept in half precision."""

import torch
from torch import nn


class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).to(torch.bfloat16)
optimizer = Sign([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 1e-2}])
for _ in range(50):
    optimizer.zero_grad()
    net(torch.randn(8, 16, dtype=torch.bfloat16)).float().pow(2).mean().backward()
    optimizer.step()
