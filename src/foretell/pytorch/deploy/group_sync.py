"""How the ranks of each run of layers agree on its gradients, where runs have ranks of their own.

Gradients are parts of one sum already: the loss of a rank counts by its share of the batch, and
what crosses from run to run is the gradient of that. So ranks add up, whatever their samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from foretell.errors import InputError
from foretell.plan.check import Run
from foretell.pytorch.deploy.factors import refusal
from foretell.pytorch.deploy.sync import Sync, synchronize
from foretell.pytorch.deploy.units import layers

Rows = Mapping[str, float]  # of each linear layer: rows of its input a sample


class Pair(NamedTuple):
    """The process groups of one set of ranks."""

    all: Any
    factors: Any  # their own, so that they may overtake buckets
    split: Any = None  # that of layers which are split over them, where there are some


@dataclass
class Syncs:
    """What keeps the ranks of each run together; runs on one rank have nothing."""

    parts: dict[int, Sync] = field(default_factory=dict)  # by run, or below zero: of several runs
    hooks: list[Any] = field(default_factory=list)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank."""
        with ExitStack() as stack:
            for part in self.parts.values():
                stack.enter_context(part.no_sync())
            yield

    def listen(self, run: int, *, is_last: bool, is_late: bool) -> None:
        """Before a backward: whether gradients leave as they are made."""
        part = self.parts.get(run)
        if part is not None and part.buckets is not None:
            part.buckets.is_syncing = is_last
        if part is not None and part.factors is not None:
            part.factors.is_syncing = is_last and not is_late

    def begin(self, run: int) -> None:
        """After the last backward of a run: send the rest."""
        if run in self.parts:
            self.parts[run].begin()

    def finish(self, *_: Any) -> None:
        """Wait until the gradients here are those of the whole batch."""
        for run in sorted(self.parts, reverse=True):  # as backward goes, on every rank
            self.parts[run].finish()

    def share(self, *_: Any) -> None:
        """After an update: hand out what only one rank has done."""
        for run in sorted(self.parts, reverse=True):
            self.parts[run].share()

    def attach(self, optimizer: Any) -> None:
        """Finish before each update and share after it."""
        self.hooks.append(optimizer.register_step_pre_hook(self.finish))
        self.hooks.append(optimizer.register_step_post_hook(self.share))

    def remove(self) -> None:
        """Take every hook off again."""
        for hook in self.hooks:
            hook.remove()
        for part in self.parts.values():
            part.remove()


def synced(
    run: Run,
    module: Any,
    group: Pair,
    *,
    given: Mapping[str, str],  # how single parameters agree, if not as the run does
    turns: Mapping[str, int],  # whose turn it is to serve a parameter
    rows: Rows,
    bucket_bytes: float,
    dtype: Any,
) -> Sync | None:
    """What keeps the ranks of one run together."""
    names = [n for n, p in module.named_parameters() if p.requires_grad]
    if not names:
        return None
    served = [sorted(run.ranks).index(rank) for rank in run.ranks]  # as their group numbers them
    choices = {n: f"ps:{served[turns[n] % len(served)]}" for n in names if run.way == "ps"}
    choices |= dict.fromkeys(names if run.way == "sharded" else (), "sharded")
    mine = {n: way for n, way in given.items() if n in names}
    if run.way == "factors" and "factors" not in mine.values():
        choices |= _by_factors(module, rows, sum(run.samples.values()))
    choices |= {n: _served(way, run) for n, way in mine.items()}
    return synchronize(
        module,
        layout=bucket_bytes,
        choices=choices,
        shares=[run.samples[rank] for rank in sorted(run.ranks)],
        group=group.all,
        own=group.factors,
        dtype=dtype,
        summed=True,
    )


def synced_late(parameters: Sequence[Any], way: str, group: Pair) -> Sync:
    """What adds up parameters of several runs, when the last backward of all is over."""
    mine = torch.nn.ParameterList(p for p in parameters if p.requires_grad)
    word = {"ps": "ps:0", "sharded": "sharded"}.get(way, "all-reduce")
    choices = {name: word for name, _ in mine.named_parameters()}
    made = synchronize(mine, choices=choices, group=group.all, summed=True)
    if made.buckets is not None:
        made.buckets.is_syncing = False
    return made


def _served(way: str, run: Run) -> str:
    """A way with its server as the group numbers it; plans count a run's ranks in their order."""
    word, _, rank = way.partition(":")
    if not rank:
        return way
    if not (rank.isdecimal() and int(rank) < len(run.ranks)):
        raise InputError(
            f"`{way}` on the {len(run.ranks)} ranks of `{run.first}` to `{run.last}`",
            hint=f"write ps:0 to ps:{len(run.ranks) - 1}",
        )
    return f"{word}:{sorted(run.ranks).index(run.ranks[int(rank)])}"


def _by_factors(module: Any, rows: Rows, batch: int) -> dict[str, str]:
    """Layers of a run whose factors are fewer bytes than their gradient (→ search … factors)."""
    found: dict[str, str] = {}
    for name, layer in module.named_modules():
        if name not in rows or refusal(layer):
            continue
        out, width = layer.weight.shape[0], layer.weight[0].numel()
        if rows[name] * batch * (width + out) < 2 * width * out:
            found |= {f"{name}.{p}": "factors" for p, _ in layer.named_parameters()}
    return found


def rows_of(module: Any) -> tuple[dict[str, float], list[Any]]:
    """Fills with rows a sample of each layer that has factors, as it is called; and the hooks."""
    found: dict[str, float] = {}

    def note(name: str, arguments: Any, output: Any) -> None:
        found[name] = (
            output.numel() / output.shape[1 if output.dim() == 4 else -1] / len(arguments[0])
        )

    hooks = [
        layer.register_forward_hook(lambda _, a, y, n=name: note(n, a, y))
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d) and not refusal(layer)
    ]
    return found, hooks


def tied(pieces: Sequence[Any], runs: Sequence[Run]) -> dict[int, list[int]]:
    """Parameters that several runs hold: the runs of each, by the id of the parameter."""
    held: dict[int, list[int]] = {}
    for q, piece in enumerate(pieces):
        for parameter in piece.parameters():
            held.setdefault(id(parameter), []).append(q)
    found = {key: where for key, where in held.items() if len(where) > 1}
    for where in found.values():
        if len({frozenset(runs[q].ranks) for q in where}) > 1:
            names = " and ".join(f"`{runs[q].first}`" for q in where)
            raise InputError(
                f"the runs of {names} share a parameter and have other ranks each",
                hint="put layers with tied weights on the same ranks",
            )
    return found


def groups_of(runs: Sequence[Run]) -> dict[frozenset[int], Pair]:
    """Process groups for each set of ranks that this rank is in.

    Every rank makes all of them, in one order: torch waits for ranks outside of a group too.
    """
    rank, found = dist.get_rank(), dict[frozenset[int], Pair]()
    wide = {frozenset(run.ranks) for run in runs if run.way == "split"}
    for ranks in dict.fromkeys(frozenset(run.ranks) for run in runs):
        if len(ranks) > 1:
            pair = Pair(*(dist.new_group(sorted(ranks)) for _ in range(3 if ranks in wide else 2)))
            found |= {ranks: pair} if rank in ranks else {}
    return found


def turns(pieces: Sequence[Any]) -> dict[str, int]:
    """Layers with parameters take turns in being served: the number of each parameter's layer."""
    filled = [
        (name, layer)
        for piece in pieces
        for name, layer in layers(piece).items()
        if any(True for _ in layer.parameters())
    ]
    return {
        f"{n}.{p}": k for k, (n, layer) in enumerate(filled) for p, _ in layer.named_parameters()
    }
