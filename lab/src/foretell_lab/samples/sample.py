"""What a sample is: the parts of a training step, made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Sample(NamedTuple):
    """The arguments of `foretell.capture`, in their order."""

    model: Callable[[], torch.nn.Module]
    batch: Callable[[], Any]
    loss: Callable[..., Any] | None
    optimizer: str


def images(
    model: Callable[[], torch.nn.Module], batch: int, optimizer: str, size: int = 224
) -> Sample:
    """A classifier of images into 1000 classes."""

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(batch, 3, size, size), torch.empty(batch, dtype=torch.int64)

    return Sample(model, data, classified, optimizer)


def classified(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy in fp32."""
    return F.cross_entropy(output.float(), target)


def tokens(model: Callable[[], torch.nn.Module], batch: int, length: int, optimizer: str) -> Sample:
    """A language model that returns its loss."""

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.empty(batch, length, dtype=torch.int64)
        return ids, torch.empty_like(ids)

    return Sample(model, data, None, optimizer)
