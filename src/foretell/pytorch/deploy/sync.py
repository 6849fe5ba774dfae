"""One gradient out of many: for each parameter, how the ranks of a data-parallel group agree.

    all-reduce   in buckets, as the layout says               buckets.py
    factors      by the factors of a linear layer             factors.py
    ps:RANK      by a server that updates for everyone        server.py
    sharded      each parameter updated by one of the ranks   server.py

`synchronize` hooks into backward and optimizer, so a plain training loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.autograd import Variable

from foretell.errors import InputError, unknown
from foretell.pytorch.deploy.buckets import Buckets, broadcast_state, share_buffers
from foretell.pytorch.deploy.factors import Factors, refusal
from foretell.pytorch.deploy.layout import Layout, by_size
from foretell.pytorch.deploy.server import Server, owners

WORDS = ("all-reduce", "factors", "ps:RANK", "sharded")


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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank, for gradient accumulation."""
        with ExitStack() as stack:
            for part in (self.buckets, self.factors):
                if part is not None:
                    stack.enter_context(part.no_sync())
            before, self.is_adding = self.is_adding, True
            yield
            self.is_adding = before

    def begin(self) -> None:
        """Send what has not left yet: the backward is over. `finish` waits for it."""
        if self.buckets is not None:
            self.buckets.flush()
        if self.factors is not None:
            self.factors.flush()
        if self.server is not None:
            self.server.begin()

    def finish(self, *_: Any) -> None:
        """Make the gradients those of the whole batch; again only after an update."""
        if self.is_done:
            return
        self.is_done = True
        for part in (self.buckets, self.factors, self.server):
            if part is not None:
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
    return Factors(modules, shares=shares, rank=rank, group=own, weight=weight)


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
