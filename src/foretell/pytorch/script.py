"""The protocol by which a user's script describes a training step.

    model()                      makes the module
    batch(rank, size, step)      the rank-th of `size` equal parts of a step's batch; the last of
                                 these may be left out, or all: then it is the whole batch
    loss(output, target)         may be missing: see `default_loss`
    optimizer(parameters)        may be missing

A batch is `(inputs, target)`; inputs may be several, `(x, y, target)` or `((x, y), target)`; or a
dict of what the model takes by name, which then gives its own loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from foretell.errors import InputError, unknown

Tensor = Any
_PART = ("rank", "size", "step")
_SAMPLES = ("batch", "batch_size")
_TARGETS = ("target", "targets", "label", "labels", "y")


class Batch(NamedTuple):
    """What a model is fed, in order, and what it should answer."""

    inputs: tuple[Tensor, ...]
    target: Tensor | None
    names: tuple[str, ...] = ()  # of the inputs, where the model takes them by name


def ask(
    batch: Callable[..., Any],
    rank: int = 0,
    size: int = 1,
    step: int = 0,
    samples: int | None = None,
    **given: Any,
) -> Any:
    """What a script's `batch` makes; it is given as much as it has parameters for."""
    wanted = inspect.signature(batch).parameters
    place = dict(zip(_PART, (rank, size, step), strict=True))
    options = {k: v for k, v in place.items() if k in wanted} | options_of(batch, given, samples)
    return batch(*_unnamed(wanted, options, tuple(place.values())), **options)


def options_of(
    call: Callable[..., Any], given: Mapping[str, Any], samples: int | None
) -> dict[str, Any]:
    """Options that a script's function takes: those given, and a batch of so many samples."""
    wanted, name = inspect.signature(call).parameters, str(getattr(call, "__name__", "batch"))
    for option in given:
        if option not in wanted:
            raise unknown(f"option of `{name}`", option, wanted)
    word = next((n for n in _SAMPLES if n in wanted), "")
    if samples is None or word:
        return dict(given) | ({} if samples is None else {word: samples})
    raise InputError(
        f"a batch of {samples} is requested, but `{name}` takes none",
        hint="give it a parameter `batch`",
    )


def _unnamed(
    wanted: Mapping[str, inspect.Parameter], options: Mapping[str, Any], place: tuple[int, ...]
) -> tuple[int, ...]:
    """Parameters with names of the user's own and no defaults are rank, size and step in turn."""
    needs = [
        p for p in wanted.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    own = [p for p in needs if p.name not in options]
    if own and own != needs:
        raise InputError(
            f"`batch` needs `{own[0].name}`, which is not given to it",
            hint="call its parameters rank, size and step, or give the others defaults",
        )
    if len(own) > len(place):
        raise InputError(
            f"`batch` takes {len(own)} arguments", hint="it is given rank, size and step"
        )
    return place[: len(own)]


def takes_part(batch: Callable[..., Any]) -> bool:
    """Whether a script's `batch` makes a part of the batch; else it makes the whole."""
    wanted = inspect.signature(batch).parameters
    needs = [p for p in wanted.values() if p.default is p.empty]
    return "rank" in wanted or bool([p for p in needs if p.name not in _SAMPLES])


def share(
    batch: Callable[..., Any],
    rank: int,
    size: int,
    step: int = 0,
    *,
    device: str = "cpu",
    shares: Sequence[int] = (),
) -> Batch:
    """A rank's part of a step's batch, on its device; `shares` are samples where not even."""
    is_whole = bool(shares) or not takes_part(batch)
    found = ordered(ask(batch, *((0, 1) if is_whole else (rank, size)), step))
    given = [None if x is None else x.to(device) for x in (*found.inputs, found.target)]
    if is_whole:
        many = len(found.inputs[0])
        sizes = list(shares) or [many // size] * size
        if sum(sizes) != many:
            raise InputError(
                f"the shares {sizes} are not of the {many} samples of a batch",
                hint="let them add up to what the script's `batch` gives",
            )
        given = [None if x is None else x.split(sizes)[rank] for x in given]
    return found._replace(inputs=tuple(given[:-1]), target=given[-1])


def ordered(found: Any) -> Batch:
    """Whatever `batch` made as inputs in order and a target."""
    if isinstance(found, Mapping):
        return Batch(tuple(found.values()), None, tuple(found))
    if isinstance(found, torch.Tensor):
        return Batch((found,), None)
    if not isinstance(found, tuple | list) or len(found) < 2:
        raise InputError(
            f"`batch` gave {type(found).__name__}, not (inputs, target)",
            hint="return inputs and the target (or None), or a dict of what the model takes",
        )
    *inputs, target = found
    flat = [x for one in inputs for x in (one if isinstance(one, tuple | list) else (one,))]
    return Batch(tuple(flat), target)


def prepared(model: Any, found: Batch, loss: Any) -> Batch:
    """The batch as this model takes it by position.

    One that wants its inputs by name is given them in order; one that takes the target too, where
    there is no loss, gives its loss itself.
    """
    if loss is not None and takes_model(loss):
        raise InputError(
            "a loss of model and batch has no parts that could run on ranks",
            hint="write loss(output, target), or let the model give its loss",
        )
    if found.names:
        if not isinstance(model.forward, partial):
            model.forward = partial(_by_name, model.forward, found.names)
        return found._replace(names=())
    if loss is None and found.target is not None and takes_target(model, len(found.inputs)):
        return Batch((*found.inputs, found.target), None)
    return found


def takes_model(loss: Callable[..., Any]) -> bool:
    """Whether a loss wants the model and the batch: its first parameter is named so."""
    if isinstance(loss, torch.nn.Module):
        return False
    try:
        names = list(inspect.signature(loss).parameters)
    except (TypeError, ValueError):
        return False
    return bool(names) and names[0] in ("model", "m", "net", "module")


def _by_name(forward: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
    return forward(**dict(zip(names, values, strict=True)))


def takes_target(model: Any, num: int) -> bool:
    """Whether a model's forward needs one more argument than its inputs, or names it a target."""
    wanted = list(inspect.signature(model.forward).parameters.values())
    needs = [p for p in wanted if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(needs) > num or (len(wanted) > num and wanted[num].name in _TARGETS)


def default_loss(output: Any, target: Any) -> Any:
    """Cross entropy for classes, the mean square for numbers; a model may give its loss itself."""
    if target is None:
        return getattr(output, "loss", output)
    call = torch.nn.functional.mse_loss
    if not target.is_floating_point():
        call = torch.nn.functional.cross_entropy
    return call(output, target)
