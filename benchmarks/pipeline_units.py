"""The model that pipeline schedules are measured on: units of unequal length, asleep or at work."""

import time
from typing import Any

import torch
from torch import nn

WIDTH, UNITS = 16, 8
LENGTHS = (1.0, 1.4, 0.8, 1.2, 1.0, 0.7, 1.3, 0.9)  # of the units, in the unit of --unit-ms
WIDE, ROWS = 192, 96  # of a unit that works: its input, and the rows of a micro-batch
_WORK = 2.0e9  # products a second that a unit's width is worked out with: one busy core


class _Sleep(torch.autograd.Function):
    """Passes a tensor on, so many seconds later each way."""

    @staticmethod
    def forward(ctx: Any, x: Any, there: float, back: float) -> Any:
        ctx.back = back
        time.sleep(there)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        time.sleep(ctx.back)
        return g, None, None


class Unit(nn.Module):
    """A linear layer that takes its time: forward, and the gradients of input and weight."""

    def __init__(self, index: int, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.seconds = seconds

    def forward(self, x: Any) -> Any:
        x = _Sleep.apply(x, self.seconds, self.seconds)
        weight = _Sleep.apply(self.weight, 0.0, self.seconds)
        return torch.tanh(x @ weight)


class Working(nn.Module):
    """Two linear layers around which the input goes too, as wide as the unit is long."""

    def __init__(self, index: int, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(index)
        inner = max(8, round(seconds * _WORK / (2 * WIDE * ROWS)))
        self.up, self.down = nn.Linear(WIDE, inner), nn.Linear(inner, WIDE)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


def stage(index: int, stages: int, unit: float, *, works: bool = False) -> nn.Sequential:
    """The units of one stage."""
    each = UNITS // stages
    kind = Working if works else Unit
    return nn.Sequential(
        *(kind(u, unit * LENGTHS[u]) for u in range(index * each, (index + 1) * each))
    )


def batch(micro_batches: int, *, works: bool = False) -> tuple[Any, Any]:
    """Inputs and targets of a step."""
    made = torch.Generator().manual_seed(1)
    rows, width = (ROWS, WIDE) if works else (4, WIDTH)
    x, y = torch.randn(2, rows * micro_batches, width, generator=made)
    return x, y
