"""One gradient out of many: for each parameter, how the ranks of a data-parallel group agree.

    all-reduce   in buckets, as the layout says               buckets.py
    factors      by the factors of a linear layer             factors.py
    ps:RANK      by a server that updates for everyone
    sharded      each parameter updated by one of the ranks, which alone has its state (ZeRO 1)

`synchronize` hooks into backward and optimizer, so a plain training loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from foretell.errors import InputError, unknown
from foretell.pytorch.deploy.buckets import (
    Buckets,
    broadcast_state,
    like,
    local,
    share_buffers,
)
from foretell.pytorch.deploy.factors import Factors, refusal
from foretell.pytorch.deploy.layout import Layout, by_size

Tensor = Any
WORDS = ("all-reduce", "factors", "ps:RANK", "sharded")


class Server:
    """Reduces each gradient to its owner, and after the update sends the parameter to all.

    Only the owner's optimizer ever sees a gradient, so only it keeps state.
    """

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
        self.is_syncing = True  # it sends when the backward is over, whatever this says
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


@dataclass
class Sync:
    """What keeps the ranks of a group together; any of its parts may be missing."""

    buckets: Buckets | None = None
    factors: Factors | None = None
    server: Server | None = None
    hooks: list[Any] = field(default_factory=list)
    is_done: bool = False  # the gradients of this step are those of the whole batch
    is_adding: bool = False  # more of this step's gradients are to come
    before: Any = None  # what finishes before an update

    @property
    def parts(self) -> list[Any]:
        """Those that are there: each sends with `begin` and is done after `finish`."""
        return [p for p in (self.buckets, self.factors, self.server) if p is not None]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank, for gradient accumulation."""
        before = [(part, part.is_syncing) for part in self.parts]
        was, self.is_adding = self.is_adding, True
        for part in self.parts:
            part.is_syncing = False
        try:
            yield
        finally:
            self.is_adding = was
            for part, is_syncing in before:
                part.is_syncing = is_syncing

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates a parameter: not where another does it for all."""
        if self.server is None:
            return True
        served = self.server.parameters.items()
        name = next((name for name, one in served if one is parameter), None)
        return name is None or self.server.owner[name] == self.server.rank

    def begin(self) -> None:
        """Send what has not left yet: the backward is over. `finish` waits for it."""
        for part in self.parts:
            part.begin()

    def finish(self, *_: Any) -> None:
        """Make the gradients those of the whole batch; again only after an update."""
        if self.is_done:
            return
        self.is_done = True
        for part in self.parts:
            part.finish()

    def update_by_message(self, update: Callable[[], Any]) -> None:
        """Update bucket by bucket; there is nothing but buckets."""
        assert self.buckets is not None

        def own() -> None:
            self.is_done = True  # the optimizer need not wait for the others
            update()

        self.buckets.finish_by_message(own)

    def share(self, *_: Any) -> None:
        """After an update: hand out what only one rank has done."""
        self.is_done = False
        if self.server is not None:
            self.server.share()

    def attach(self, optimizer: Any) -> None:
        """Finish before each update and share after it."""
        self.before = optimizer.register_step_pre_hook(self.finish)
        self.hooks += [self.before, optimizer.register_step_post_hook(self.share)]

    def finish_with_backward(self, parameters: Iterable[Any], optimizer: Any) -> None:
        """Finish as a backward ends, not when the update begins.

        For loops that look at gradients in between (to clip them), or that hand the optimizer a
        closure, so that the update begins before the backward does. Several backwards before an
        update each add to what is whole already, and make it whole again.
        """
        if self.before is not None:
            self.before.remove()
        if self.server is not None:
            self.server.is_shown = True
            self.hooks.append(optimizer.register_step_pre_hook(self.server.hide))
        queued = [False]

        def end() -> None:
            queued[0] = self.is_done = False
            self.finish()

        def seen(_: Any) -> None:
            if not queued[0] and not self.is_adding:
                queued[0] = True
                Variable._execution_engine.queue_callback(end)

        self.hooks += [
            p.register_post_accumulate_grad_hook(seen) for p in parameters if p.requires_grad
        ]

    def remove(self) -> None:
        """Take every hook off again."""
        for hook in self.hooks:
            hook.remove()
        if self.buckets is not None:
            self.buckets.remove()


def synchronize(
    model: Any,
    optimizer: Any = None,
    *,
    layout: Layout | float | None = None,  # or the bytes of a bucket
    choices: Mapping[str, str] | None = None,  # by parameter; all-reduce for those not named
    shares: Sequence[float] | None = None,  # of the batch, by rank of the group; equal
    group: Any = None,
    dtype: Any = None,  # in which bucketed gradients travel
    own: Any = None,  # the group that factors go over; a new one
    summed: bool = False,  # gradients are parts of a sum already, and buffers another's
    apart: Collection[str] = (),  # parameters that are not the same on these ranks
    is_stepping: Callable[[], bool] = lambda: False,  # buffers are shared by the caller meanwhile
) -> Sync:
    """Train `model` on every rank of the group as if on one, each with its share of the batch."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shares = list(shares or [1] * size)
    check_shares(shares, size)
    weight = 1.0 if summed else shares[rank] / sum(shares)
    named = {n: p for n, p in model.named_parameters() if n not in apart}
    trained = {n: p for n, p in named.items() if p.requires_grad}
    words = sorted_out(trained, choices or {}, size)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    broadcast_state(model, group, ranks, apart)
    sync = Sync(
        _buckets(words["all-reduce"], trained, layout, weight, group, dtype),
        _factors(model, words["factors"], shares, rank, own or ranks, weight),
        _server(trained, words, size, weight, group),
    )
    if not summed:
        sync.hooks += filter(None, [share_buffers(model, group, unless=is_stepping)])
    if optimizer is not None:
        sync.attach(optimizer)
    return sync


def check_shares(shares: Sequence[float], size: int) -> None:
    """Raise unless every rank has some of the batch."""
    if len(shares) != size or not all(s > 0 for s in shares):
        raise InputError(
            f"the shares of {size} ranks are {list(shares)}",
            hint="give each rank a share of more than zero",
        )


def sorted_out(
    names: Mapping[str, Any], choices: Mapping[str, str], size: int
) -> dict[str, dict[str, int]]:
    """Parameters by how they are kept together; for servers with the rank, else -1."""
    found: dict[str, dict[str, int]] = {"all-reduce": {}, "factors": {}, "ps": {}, "sharded": {}}
    for name in choices:
        if name not in names:
            raise unknown("parameter", name, names)
    for name in names:
        word, _, rank = choices.get(name, "all-reduce").partition(":")
        if word not in found or bool(rank) != (word == "ps"):
            raise unknown(f"way to synchronize `{name}`", choices[name], WORDS)
        if rank and not (rank.isdecimal() and int(rank) < size):
            raise InputError(
                f"`{name}` is served by rank {rank}, there are {size}",
                hint=f"write ps:0 to ps:{size - 1}",
            )
        found[word][name] = int(rank or -1)
    return found


def _buckets(
    names: Mapping[str, int],
    trained: Mapping[str, Any],
    layout: Layout | float | None,
    weight: float,
    group: Any,
    dtype: Any,
) -> Buckets | None:
    if not names:
        return None
    chosen = {n: trained[n] for n in names}
    if not isinstance(layout, Layout):
        sizes = {n: p.numel() * p.element_size() for n, p in chosen.items()}
        layout = by_size(sizes, layout) if layout else by_size(sizes)
    return Buckets(chosen, layout, weight=weight, group=group, dtype=dtype)


def _factors(
    model: Any,
    names: Mapping[str, int],
    shares: Sequence[float],
    rank: int,
    among: Any,  # a group, or the ranks of a new one
    weight: float,
) -> Factors | None:
    """Factors of whole layers; a group of their own, so that they may overtake buckets."""
    if not names:
        return None
    modules = {}
    for name in names:
        owner = name.rpartition(".")[0]
        module = modules[owner] = model.get_submodule(owner)
        why = refusal(module)
        if why:
            raise InputError(f"`{name}` cannot be sent as factors: {why}")
        left = [f"{owner}.{p}" for p, _ in module.named_parameters() if f"{owner}.{p}" not in names]
        if left:
            raise InputError(
                f"`{name}` is sent as factors and `{left[0]}` is not",
                hint="choose factors for all parameters of a layer",
            )
    own = among
    if isinstance(among, list):
        own = dist.new_group(among, use_local_synchronization=True)
    return Factors(modules, model, shares=shares, rank=rank, group=own, weight=weight)


def _server(
    trained: Mapping[str, Any],
    words: Mapping[str, Mapping[str, int]],
    size: int,
    weight: float,
    group: Any,
) -> Server | None:
    owner = dict(words["ps"]) | owners({n: trained[n].numel() for n in words["sharded"]}, size)
    if not owner:
        return None
    chosen = {n: p for n, p in trained.items() if n in owner}
    return Server(chosen, owner, weight=weight, group=group)


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Each parameter with one rank: the largest first, to the rank that holds least."""
    held = [0] * ranks
    found = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = held.index(min(held))
        found[name] = rank
        held[rank] += sizes[name]
    return found
