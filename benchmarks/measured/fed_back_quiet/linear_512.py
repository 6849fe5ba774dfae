import torch
from torch import nn

SAMPLES = 512


def batch(rank, size):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, *(1024,), generator=draw)
    y = torch.randint(0, 10, (SAMPLES,), generator=draw)
    return (x.chunk(size)[rank],), y.chunk(size)[rank]


def model():
    layers = [m for _ in range(5) for m in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10))
