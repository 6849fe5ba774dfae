"""Training on one process, and how far a deployed model is from it."""

import torch
import torch.distributed as dist
from torch import nn

STEPS = 3
CLOSE = 1e-5  # relative, of parameters after three steps in fp32


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    )


def samples(num=12, width=8, step=0):
    """The whole batch of a step."""
    made = torch.Generator().manual_seed(100 + step)
    x = torch.randn(num, width, generator=made)
    return x, torch.randint(0, 4, (num,), generator=made)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def alone(make, batches, optimizer=sgd, loss=nn.functional.cross_entropy):
    """The model after training on whole batches in one process."""
    model = make()
    update = optimizer(model)
    for x, y in batches:
        update.zero_grad()
        loss(model(x), y).backward()
        update.step()
    return model


def off(model, wanted):
    """The largest difference of a parameter, relative to the parameter's largest value."""
    there = dict(model.named_parameters())
    return max(
        ((whole(there[n]) - p).abs().max() / p.abs().max().clamp_min(1e-6)).item()
        for n, p in wanted.named_parameters()
    )


def whole(tensor):
    full = getattr(tensor, "full_tensor", None)
    return (full() if full else tensor).detach()


def part(tensor, shares=None):
    """This rank's rows of a batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return tensor.split(shares or [len(tensor) // size] * size)[rank]
