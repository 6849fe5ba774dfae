"""A script that describes a training step: functions that make a model and a batch.

With functions `model` and `batch` at its top level, a script is a description, in the words of
`foretell.pytorch.script`. Otherwise it is run as it is and its steps are watched
(→ `foretell.pytorch.intake`).
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from foretell import profile as marks
from foretell.errors import InputError
from foretell.pytorch.capture.step import Step
from foretell.pytorch.script import ask


def trained_forever(path: Path, device: torch.device) -> None:
    """Take the step that a script describes over and over."""
    described = runpy.run_path(str(path), run_name="foretell_profile")
    train = training_step(described, path, device)
    while True:
        with marks.step():
            train()


def training_step(names: Mapping[str, Any], path: Path, device: torch.device) -> Callable[[], None]:
    """One step of what a description describes: forward, loss, backward, update."""
    model = names["model"]()
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"`model()` of `{path}` made {type(model).__name__}, no torch.nn.Module")
    model = model.to(device).train()
    batch = moved(ask(names["batch"]), device)
    make = names.get("optimizer")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(trained) if make is not None else None
    step = Step(model, batch, names.get("loss"), optimizer)

    def train() -> None:
        for p in trained if optimizer is None else ():
            p.grad = None
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        step.run().backward()
        if optimizer is not None:
            optimizer.step()

    return train


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on a device, whatever it is made of."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {k: moved(v, device) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(v, device) for v in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(v, device) for v in batch)
    return batch
