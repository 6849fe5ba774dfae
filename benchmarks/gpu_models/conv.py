"""A residual convolutional network with batch norm, 64 images of 128 × 128."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, before, wide, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, wide, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)
        self.skip = nn.Conv2d(before, wide, 1, stride, bias=False)

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


def model():
    sizes = [(3, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 512, 2)]
    blocks = [Block(*size) for size in sizes]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def batch(rank=0, size=1, step=0, batch=64):
    made = torch.Generator().manual_seed(100 + step)
    x = torch.randn(batch, 3, 128, 128, generator=made).chunk(size)[rank]
    y = torch.randint(0, 1000, (batch,), generator=made).chunk(size)[rank]
    return x, y


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
