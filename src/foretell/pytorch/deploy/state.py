"""What a deployed model holds on this rank, as whole tensors under the names of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from foretell.pytorch.deploy.collective import gathered

Tensor = Any


def whole(made: Any, of: Callable[[Tensor], Tensor | None]) -> Iterator[tuple[str, Tensor | None]]:
    """A tensor of each parameter here, parts put together; asked on all ranks at once.

    None where this rank has none: a gradient that another rank keeps, or that nothing made.
    """
    for name, parameter in made.here.items():
        tensor = of(parameter)
        if hasattr(parameter, "full_tensor"):
            tensor = _full(parameter, tensor)
        elif id(parameter) in made.splits:
            dim, sizes, group = made.splits[id(parameter)]
            tensor = gathered(_or_zeros(parameter, tensor), dim, sizes, group)
        yield name, tensor


def gradients(made: Any) -> Iterator[tuple[str, Tensor | None]]:
    """The gradients of the last step."""
    return whole(made, lambda p: p.grad)


def parameters(made: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters as they are now."""
    return whole(made, lambda p: p.detach())


def buffers(made: Any) -> dict[str, Tensor]:
    """The buffers of this rank by their names in the whole model."""
    if made.pipeline is None:
        return dict(made.model.named_buffers())
    found: dict[str, Tensor] = {}
    for stage in made.pipeline.modules.values():
        found |= dict(stage.named_buffers())
    return found


def _full(parameter: Tensor, tensor: Tensor | None) -> Tensor | None:
    """A sharded tensor put together: zeros for a gradient that no rank of its mesh has."""
    if tensor is None:
        return None
    return (tensor if hasattr(tensor, "full_tensor") else parameter.detach()).full_tensor()


def _or_zeros(parameter: Tensor, tensor: Tensor | None) -> Tensor:
    return torch.zeros_like(parameter) if tensor is None else tensor.detach()


def still(model: nn.Module) -> list[str]:
    """Turn dropout off, wherever a module keeps its rate; which modules that were."""
    found = []
    for name, module in model.named_modules():
        rates = [k for k, v in vars(module).items() if "drop" in k and type(v) is float and v > 0]
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            rates.append("p")
        for key in rates:
            setattr(module, key, 0.0)
        found += [name] if rates else []
    return found
