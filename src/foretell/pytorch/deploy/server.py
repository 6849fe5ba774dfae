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

from foretell.pytorch.deploy.buckets import like, local

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
        self.is_shown = False  # every rank sees every gradient, for loops that clip
        self._begun: dict[str, tuple[Any, Tensor]] = {}

    def begin(self) -> None:
        """Send every gradient to its owner."""
        self._begun = {name: self._reduce(name) for name in self.parameters}

    def finish(self) -> None:
        """Give each owner its gradients; other ranks keep none."""
        if not self._begun:
            self.begin()
        for name, (work, message) in self._begun.items():
            work.wait()
            parameter, is_mine = self.parameters[name], self.owner[name] == self.rank
            if self.is_shown:
                dist.broadcast(message, src=self.ranks[self.owner[name]], group=self.group)
            is_used = (is_mine or self.is_shown) and bool(
                (is_mine and parameter.grad is not None) or message[-1] > 0
            )
            total = message[:-1].view_as(local(parameter))
            parameter.grad = like(total, parameter) if is_used else None
        self._begun = {}

    def hide(self, *_: Any) -> None:
        """Before the update: only the owner's optimizer sees a gradient."""
        for name, parameter in self.parameters.items():
            if self.owner[name] != self.rank:
                parameter.grad = None

    def share(self) -> None:
        """After the update: every rank gets the parameter of its owner."""
        works = [
            dist.broadcast(
                local(p.detach()), src=self.ranks[self.owner[n]], group=self.group, async_op=True
            )
            for n, p in self.parameters.items()
        ]
        for work in works:
            work.wait()

    def _reduce(self, name: str) -> tuple[Any, Tensor]:
        """Send a gradient, and behind it whether there is one."""
        parameter = self.parameters[name]
        held = local(parameter)
        message = torch.zeros(held.numel() + 1, dtype=held.dtype, device=held.device)
        if parameter.grad is not None:
            torch.mul(local(parameter.grad).flatten(), self.weight, out=message[:-1])
            message[-1] = 1.0
        to = self.ranks[self.owner[name]]
        work = dist.reduce(message, dst=to, group=self.group, async_op=True)
        return work, message


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Each parameter with one rank: the largest first, to the rank that holds least."""
    held = [0] * ranks
    found = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = held.index(min(held))
        found[name] = rank
        held[rank] += sizes[name]
    return found
