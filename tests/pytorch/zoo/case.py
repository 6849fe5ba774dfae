"""What a model of the zoo is: a function that makes it, one that makes its batch, and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A model to capture: nothing is made before it is asked for."""

    name: str
    model: Callable[[], Any]
    batch: Callable[[], Any]
    loss: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name
