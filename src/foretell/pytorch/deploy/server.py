"""Parameters that live with one rank: it gets their gradients, updates them, and sends them back.

A parameter server holds some parameters for everyone; `owners` spreads all parameters over all
ranks by size, which is sharding the optimizer's state (ZeRO 1). Only the owner's optimizer ever
sees a gradient, so only it keeps state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

Tensor = Any


class Server:
    """Reduces each gradient to its owner, and after the update sends the parameter to all."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        owner: Mapping[str, int],  # rank in the group
        *,
        weight: float,
        group: Any = None,
    ) -> None:
        self.parameters, self.owner = dict(parameters), dict(owner)
        self.weight, self.group = weight, group
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank = dist.get_rank(group)
        self._begun: dict[str, tuple[Any, Tensor]] = {}

    def begin(self) -> None:
        """Send every gradient to its owner."""
        self._begun = {name: self._reduce(name) for name in self.parameters}

    def finish(self) -> None:
        """Give each owner its gradients; other ranks keep none."""
        if not self._begun:
            self.begin()
        for name, (work, total) in self._begun.items():
            work.wait()
            mine = self.owner[name] == self.rank
            self.parameters[name].grad = total if mine else None
        self._begun = {}

    def share(self) -> None:
        """After the update: every rank gets the parameter of its owner."""
        works = [
            dist.broadcast(
                p.detach(), src=self.ranks[self.owner[n]], group=self.group, async_op=True
            )
            for n, p in self.parameters.items()
        ]
        for work in works:
            work.wait()

    def _reduce(self, name: str) -> tuple[Any, Tensor]:
        parameter = self.parameters[name]
        grad = parameter.grad
        total = torch.zeros_like(parameter) if grad is None else grad * self.weight
        work = dist.reduce(total, dst=self.ranks[self.owner[name]], group=self.group, async_op=True)
        return work, total


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Each parameter with one rank: the largest first, to the rank that holds least."""
    held = [0] * ranks
    found = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = held.index(min(held))
        found[name] = rank
        held[rank] += sizes[name]
    return found
