import torch
from torch import nn

SAMPLES = 32


def batch(rank, size):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, *(3, 32, 32), generator=draw)
    y = torch.randint(0, 10, (SAMPLES,), generator=draw)
    return (x.chunk(size)[rank],), y.chunk(size)[rank]


def model():
    sizes = ((3, 32), (32, 64), (64, 128))
    body = [
        part
        for a, b in sizes
        for part in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10))
