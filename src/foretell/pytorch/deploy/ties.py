"""Parameters that have several names, or that several stages of a pipeline hold: kept one.

Stages on one rank share the tensor itself. Where stages are on different ranks each has a copy,
and the copies stay equal because all of them take the sum of their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from foretell.errors import InputError

Tensor = Any
Homes = Mapping[str, Sequence[tuple[int, ...]]]  # of each parameter, the ranks of its stages


def aliases(model: Any) -> dict[str, str]:
    """The first name of each parameter, by every name it has."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(p), name) for name, p in every}


def shared_names(model: Any) -> dict[str, list[str]]:
    """Parameters with more than one name: all of them, by the first."""
    found: dict[str, list[str]] = {}
    for name, first in aliases(model).items():
        found.setdefault(first, []).append(name)
    return {first: names for first, names in found.items() if len(names) > 1}


def tied_names(model: Any) -> set[str]:
    """Every name of a parameter that has more than one."""
    return {name for names in shared_names(model).values() for name in names}


def here(modules: Iterable[Any], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The parameters of some modules by their first names; raise where a tie was cut."""
    found: dict[str, Tensor] = {}
    for module in modules:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first = names.get(name, name)
            if found.setdefault(first, parameter) is not parameter:
                raise InputError(
                    f"`{name}` and `{first}` are one parameter, and the plan splits one of them",
                    hint="leave layers with tied weights out of `tensor_layout`, or untie them",
                )
    return found


def holders(homes: Homes, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters of a rank that others hold besides, and the ranks that hold the same part."""
    for name, each in homes.items():
        groups = list(dict.fromkeys(each))
        if len(groups) < 2:
            continue
        ranks = [r for group in groups for r in group]
        if len(set(ranks)) < len(ranks) or len({len(g) for g in groups}) > 1:
            raise InputError(
                f"`{name}` is in stages on ranks {' and '.join(str(list(g)) for g in groups)}",
                hint="parameters that stages share need the same ranks, or as many others",
            )
        own = next((group for group in groups if rank in group), None)
        if own is not None:
            yield name, tuple(sorted(group[own.index(rank)] for group in groups))


def add_up(shared: Sequence[tuple[Tensor, Any]]) -> None:
    """Give every copy of a parameter the sum of the gradients of all."""
    for parameter, group in shared:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        dist.all_reduce(grad.to_local() if hasattr(grad, "to_local") else grad, group=group)
