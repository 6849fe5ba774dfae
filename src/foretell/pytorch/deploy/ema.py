"""Exponential averages of the parameters of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from foretell.errors import InputError
from foretell.pytorch.deploy.buckets import local

Tensor = Any


class Ema:
    """average = decay · average + (1 − decay) · parameter, after every update."""

    def __init__(self, decay: float, parameters: Mapping[str, Tensor]) -> None:
        if not 0 < decay < 1:
            raise InputError(f"a decay of {decay:g}", hint="it is between 0 and 1, say 0.999")
        self.decay = decay
        self.kept = {name: p.detach().clone() for name, p in parameters.items()}

    def update(self, parameters: Mapping[str, Tensor]) -> None:
        """Move the averages towards the parameters."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                local(self.kept[name]).lerp_(local(parameter.detach()), 1 - self.decay)
