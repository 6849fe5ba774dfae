"""Two backward passes a step (sharpness-aware), by a wrapper around another optimizer."""

import torch
import torch.nn.functional as F
from torch import nn


class Sam(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, dict(rho=rho, **options))
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        every = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            self.state[p]["old"] = p.detach().clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError


net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
optimizer = Sam(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
for _ in range(60):
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    F.cross_entropy(net(x), y).backward()
    optimizer.first_step()
    F.cross_entropy(net(x), y).backward()
    optimizer.second_step()
