"""One gradient out of many: for each parameter, how the ranks of a data-parallel group agree.

    all-reduce   in buckets, as the layout says               buckets.py
    factors      by the factors of a linear layer, below
    ps:RANK      by a server that updates for everyone
    sharded      each parameter updated by one of the ranks, which alone has its state (ZeRO 1)

`synchronize` hooks into backward and optimizer, so a plain training loop stays as it is.

Sufficient factors: a linear layer's gradient sent as what it is the product of.

    ∂L/∂W = Gᵀ X         G: batch × out, X: batch × in

Where batch · (in + out) is less than in · out, gathering X and G from all ranks moves less than
reducing the product; an X that several layers read (query, key and value) is gathered once. The
product over all rows, each rank's weighted by its share of the batch, is the gradient that data
parallel would have. A 1×1 convolution is a linear layer over its pixels.

Factors leave as the backward goes where ranks know each other's rows: as many as their shares of
the batch. They do not know them where a forward looks at values, as one that routes tokens to
experts. The first step shows which it is: its factors leave after the backward, with their counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.errors import InputError, unknown
from foretell.pytorch.deploy.buckets import (
    BUCKET_BYTES,
    Buckets,
    Layout,
    broadcast_state,
    like,
    local,
    of_parameters,
    share_buffers,
)
from foretell.pytorch.deploy.collective import all_gather

Tensor = Any
Module = Any
_gather = all_gather


class Factors:
    """Gathers the factors of some layers during the backward; `finish` makes their gradients."""

    def __init__(
        self,
        modules: dict[str, Module],
        model: Module,  # that calls them
        *,
        shares: Sequence[float],  # rows of each rank, in any unit
        rank: int,
        group: Any = None,
        weight: float | None = None,  # by which this rank's gradients count; its share
    ) -> None:
        for name, module in modules.items():
            why = refusal(module)
            if why:
                raise InputError(f"`{name}` cannot send factors: {why}")
        self.modules, self.group, self.rank = modules, group, rank
        self.shares = [s / sum(shares) for s in shares]
        self.weight = self.shares[rank] if weight is None else weight
        self.is_syncing = True  # else factors are kept until the next backward that sends
        self.knows_rows = False  # of other ranks, without asking them
        self._values: _ValuesRead | None = _ValuesRead(model)
        self._kept: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in modules}
        self._sent: list[tuple[str, _Gathered, _Gathered]] = []
        self._used_beside: list[Tensor] = []
        self._inputs: dict[object, tuple[list[Tensor], _Gathered]] = {}  # kept alive
        self._own = dict.fromkeys(p for m in modules.values() for p in m.parameters())
        self._strays: dict[Tensor, Tensor] = {}  # gradients from uses of a weight beside its layer
        for name, module in modules.items():
            module.forward = self._forward(name, module)
        for parameter in self._own:
            parameter.register_hook(partial(self._strayed, parameter))

    @property
    def parameters(self) -> set[str]:
        """The parameters whose gradients come from factors."""
        return {f"{n}.{p}" for n, m in self.modules.items() for p, _ in m.named_parameters()}

    def begin(self) -> None:
        """Send what was kept, layer by layer as they are named: the same order on every rank."""
        for name, kept in self._kept.items():
            if kept and self.knows_rows:
                self._send(name)

    def finish(self) -> None:
        """Wait for the factors of all ranks and multiply them."""
        if self.knows_rows:
            self.begin()
        else:
            self._send_counted()
        for name, x, g in self._sent:
            for one in (x, g):
                one.work.wait()
            add_gradient(self.modules[name], x.rows, g.rows)
        for parameter in self._used_beside:
            stray = self._strays.pop(parameter, None)
            stray = torch.zeros_like(parameter) if stray is None else stray
            dist.all_reduce(stray, group=self.group)
            _add(parameter, stray)
        self._sent.clear()
        self._inputs.clear()

    def _forward(self, name: str, module: Module) -> Any:
        is_conv = isinstance(module, torch.nn.Conv2d)

        def forward(x: Tensor) -> Tensor:
            rows = _pixels(x, module) if is_conv else x
            y = _Linear.apply(rows, module.weight, module.bias, (self, name))
            return y.movedim(-1, 1) if is_conv else y

        return forward

    def _take(self, name: str, x: Tensor, g: Tensor) -> None:
        """One backward of one layer: send its factors, and those kept before it."""
        self._kept[name].append((x.detach(), rows_of(g) * self.weight))
        if self.is_syncing and self.knows_rows:
            self._send(name)

    def _send_counted(self) -> None:
        """Send what was kept when all ranks have said how many rows that is."""
        kept = {name: [rows_of(x) for x, _ in each] for name, each in self._kept.items()}
        counts = [sum(map(len, parts)) for parts in kept.values()]
        beside = [p in self._strays for p in self._own]
        every = self._exchanged([*counts, *beside, self._values is None or self._values.is_seen])
        counted, used = every[: len(kept)], every[len(kept) : -1]
        self._used_beside = [p for p, each in zip(self._own, used, strict=True) if any(each)]
        for (name, parts), rows in zip(kept.items(), counted, strict=True):
            if any(rows):
                weight = self.modules[name].weight
                grads = [g for _, g in self._kept[name]]
                x, g = (
                    self._gathered([weight.new_empty((0, width)), *some], max(rows))
                    for some, width in ((parts, weight[0].numel()), (grads, len(weight)))
                )
                self._sent.append((name, x, g))
            self._kept[name] = []
        if self._values is not None:
            self._values.remove()
            self._values = None
            self.knows_rows = not any(every[-1]) and all(
                len({self._most(n, rank) for rank, n in enumerate(rows)}) == 1 for rows in counted
            )

    def _exchanged(self, mine: list[int]) -> list[list[int]]:
        """What the ranks say: of each thing, one number a rank."""
        device = next(iter(self._own)).device
        table = torch.zeros((len(mine), len(self.shares)), dtype=torch.int64, device=device)
        table[:, self.rank] = torch.tensor(mine, device=device)
        dist.all_reduce(table, group=self.group)
        return table.tolist()  # type: ignore[no-any-return]

    def _strayed(self, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Keep the gradient of a use beside the layer: it is added up over ranks."""
        if gradient is None:  # of the layer itself, whose factors make it
            return None
        before = self._strays.get(parameter, 0.0)
        self._strays[parameter] = before + gradient * self.weight
        return torch.zeros_like(gradient)

    def _most(self, rows: int, rank: int) -> int:
        """Rows of the rank with most, where one has so many by its share."""
        return round(rows * max(self.shares) / self.shares[rank])

    def _send(self, name: str) -> None:
        kept, self._kept[name] = self._kept[name], []
        inputs = [x for x, _ in kept]
        read = tuple((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in inputs)
        if read not in self._inputs:
            self._inputs[read] = inputs, self._gathered([rows_of(x) for x in inputs])
        gradients = self._gathered([g for _, g in kept])
        self._sent.append((name, self._inputs[read][1], gradients))

    def _gathered(self, parts: list[Tensor], most: int = 0) -> _Gathered:
        """Gather rows; a rank with fewer than `most` sends zeros behind them, which add nothing."""
        mine = torch.cat(parts)
        most = most or self._most(len(mine), self.rank)
        padded = F.pad(mine, (0, 0, 0, most - len(mine))).contiguous()
        rows = padded.new_empty((len(self.shares) * most, padded.shape[1]))
        return _Gathered(_gather(rows, padded, group=self.group, async_op=True), rows)


class _ValuesRead(TorchDispatchMode):  # type: ignore[misc]
    """Whether forwards of a model read values, so that shapes may depend on them."""

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.is_seen = False
        self._hooks = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, *_: Any) -> None:
        self.__enter__()

    def _end(self, *_: Any) -> None:
        self.__exit__(None, None, None)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output
        is_index = op is torch.ops.aten.index.Tensor  # by index, or by a boolean mask
        by_truth = is_index and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        self.is_seen |= by_truth if is_index else any(tag in op.tags for tag in tags)
        return op(*args, **(kwargs or {}))


class _Gathered(NamedTuple):
    """Rows of all ranks on their way."""

    work: Any
    rows: Tensor


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """A linear layer whose backward hands its factors over in place of a weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, to: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.to = to
        flat = weight.reshape(weight.shape[0], -1)
        return F.linear(x, flat, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        factors, name = ctx.to
        factors._take(name, x.to(g.dtype), g)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        back = g @ weight.reshape(weight.shape[0], -1).to(g.dtype)
        return back.to(x.dtype), None, None, None


def refusal(module: Module) -> str:
    """Why a layer has no factors, or nothing."""
    if isinstance(module, torch.nn.Linear):
        return ""
    if not isinstance(module, torch.nn.Conv2d):
        return f"{type(module).__name__} is neither a linear layer nor a 1×1 convolution"
    if (
        module.kernel_size != (1, 1)
        or module.groups != 1
        or module.padding not in ((0, 0), "valid")
    ):
        return f"its kernel is {module.kernel_size}, groups {module.groups}; only 1×1, one group"
    return ""


def _pixels(x: Tensor, conv: Module) -> Tensor:
    """The pixels a 1×1 convolution reads, channels last."""
    down, across = conv.stride
    return x[:, :, ::down, ::across].movedim(1, -1)


def rows_of(x: Tensor) -> Tensor:
    """Samples and tokens of a tensor as rows."""
    return x.reshape(-1, x.shape[-1])


def add_gradient(module: Module, x: Tensor, g: Tensor) -> None:
    """Multiply the factors of all ranks, and add that to a layer's gradients."""
    common = torch.promote_types(x.dtype, g.dtype)
    product = g.to(common).t() @ x.to(common)
    _add(module.weight, product.to(module.weight.dtype).view_as(module.weight))
    if module.bias is not None:
        _add(module.bias, g.sum(0).to(module.bias.dtype))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


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
    is_queued: bool = False  # to finish at the end of the backward that is open
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
        self.hooks += [
            p.register_post_accumulate_grad_hook(self.finish_later)
            for p in parameters
            if p.requires_grad
        ]

    def finish_later(self, *_: Any) -> None:
        """Inside a backward: finish at its end."""

        def end() -> None:
            self.is_queued = self.is_done = False
            self.finish()

        if not self.is_queued and not self.is_adding:
            self.is_queued = True
            Variable._execution_engine.queue_callback(end)

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
    if len(shares) != size or not all(s > 0 for s in shares):
        raise InputError(
            f"the shares of {size} ranks are {shares}",
            hint="give each rank a share of more than zero",
        )
    weight = 1.0 if summed else shares[rank] / sum(shares)
    named = {n: p for n, p in model.named_parameters() if n not in apart}
    trained = {n: p for n, p in named.items() if p.requires_grad}
    words = sorted_out(trained, choices or {}, size)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    broadcast_state(model, group, ranks, apart)
    reduced = {n: trained[n] for n in words["all-reduce"]}
    if not isinstance(layout, Layout):
        layout = of_parameters(reduced, layout or BUCKET_BYTES)
    owner = words["ps"] | owners({n: trained[n].numel() for n in words["sharded"]}, size)
    served = {n: p for n, p in trained.items() if n in owner}
    sync = Sync(
        Buckets(reduced, layout, weight=weight, group=group, dtype=dtype) if reduced else None,
        _factors(model, words["factors"], shares, rank, own or ranks, weight),
        Server(served, owner, weight=weight, group=group) if served else None,
    )
    if not summed:
        sync.hooks += filter(None, [share_buffers(model, group, unless=is_stepping)])
    if optimizer is not None:
        sync.attach(optimizer)
    return sync


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


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Each parameter with one rank: the largest first, to the rank that holds least."""
    held = [0] * ranks
    found = {}
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = held.index(min(held))
        found[name] = rank
        held[rank] += sizes[name]
    return found
