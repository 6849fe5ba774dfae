"""The pieces of a model that are handled one by one: sharded, recomputed, cut into stages.

A model's units are the children of its largest container (nn.Sequential, nn.ModuleList, or an
nn.ModuleDict with numbers for keys) that have parameters: the blocks of a transformer, the layers
of a plain network.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from foretell.errors import InputError, unknown

Module = Any
HEAD = "head"  # what workloads call the layer that is the loss


def units(model: Module) -> dict[str, Module]:
    """The model's blocks by name; the model itself where it has no container."""
    boxes = [(name, m) for name, m in model.named_modules() if is_box(m)]
    if not boxes:
        return {"": model}
    name, box = max(boxes, key=lambda pair: (size_of(pair[1]), -len(pair[0])))
    dot = f"{name}." if name else ""
    return {f"{dot}{n}": child for n, child in box.named_children() if size_of(child)}


def row(box: Module) -> list[tuple[str, Module]]:
    """The children of a container in order, one that is there twice twice."""
    return [(name, child) for name, child in box._modules.items() if child is not None]


def is_box(module: Module) -> bool:
    """Whether a module is a row of others; one by numbers is a row, one by names is not."""
    if isinstance(module, nn.ModuleDict):
        return len(module) > 0 and all(key.isdecimal() for key in module)
    return isinstance(module, nn.Sequential | nn.ModuleList)


def cut(model: Module, num: int, layers: Sequence[int] = ()) -> list[Module]:
    """A model that `is_line` in stages, in order of forward; names of parameters stay as they are.

    `layers` says how many children, or how many children with parameters, each stage has.
    """
    own = getattr(model, "stages", None)
    if callable(own):
        found = list(own(num))
        if len(found) != num:
            raise InputError(f"`stages({num})` of the model gave {len(found)} stages")
        return found
    children = row(model)
    held = [size_of(child) for _, child in children]
    filled = [place for place, size in enumerate(held) if size]
    ends = stage_ends(held, num, layers, range(len(held)), filled)
    starts = [0, *ends[:-1]]
    return [nn.Sequential(OrderedDict(children[a:b])) for a, b in zip(starts, ends, strict=True)]


def is_line(model: Module) -> bool:
    """Whether a model says how it is cut: an nn.Sequential, or one with a method `stages`."""
    return isinstance(model, nn.Sequential) or callable(getattr(model, "stages", None))


def layers(model: Module) -> dict[str, Module]:
    """The layers that a plan may name, in order of forward: those of `layers()`, or of a line.

    A line is an nn.Sequential; one inside another counts layer by layer.
    """
    own = getattr(model, "layers", None)
    if callable(own) and not isinstance(own, nn.Module):
        return dict(own())
    if not isinstance(model, nn.Sequential):
        raise InputError(
            f"{type(model).__name__} cannot be cut into runs of layers",
            hint="make it an nn.Sequential, or give it a method `layers()`: a dict by name, "
            "in order of forward",
        )
    found: dict[str, Module] = {}
    for name, child in row(model):
        inner = layers(child) if isinstance(child, nn.Sequential) else {}
        found |= {f"{name}.{n}": m for n, m in inner.items()} or {name: child}
    return found


def cut_at(model: Module, rows: Sequence[tuple[str, str]]) -> list[Module]:
    """A model in runs of layers, given the first and last of each; parameters keep their names.

    A name stands for all layers inside it. What a plan does not name (an activation, a norm) goes
    with the layer before. The last run may end with `head`: a workload's name for the loss, where
    the model has no layer of that name.
    """
    known = layers(model)
    names = [*known, HEAD] if rows[-1][1] == HEAD not in known else [*known]
    spans = [(_found(names, first)[0], _found(names, last)[-1]) for first, last in rows]
    behind = 0
    for (first, last), (start, end) in zip(rows, spans, strict=True):
        if start < behind or end < start:
            raise InputError(
                f"the plan's layers go on with `{first}` to `{last}`; "
                f"the model has them in another order: {', '.join(known)}",
                hint="rows name every layer once, in the order of forward",
            )
        _require_light(known, names[behind:start])
        behind = end + 1
    _require_light(known, names[behind:])
    at, spread = [0, *(start for start, _ in spans[1:])], not isinstance(model, nn.Sequential)
    ends = [*at[1:], len(known)]
    return [_line(known, names[a:b], spread) for a, b in zip(at, ends, strict=True)]


def _found(names: Sequence[str], wanted: str) -> list[int]:
    """Places of the layers that a name stands for: its own, or all inside it."""
    at = [i for i, n in enumerate(names) if n == wanted or n.startswith(f"{wanted}.")]
    if not at:
        raise unknown("layer in the plan's groups", wanted, names)
    return at


def _require_light(known: Mapping[str, Module], names: Sequence[str]) -> None:
    """Raise where a layer that a plan would have to name is not among its rows."""
    for name in names:
        heavy = [p for p in known[name].parameters() if p.dim() > 1] if name in known else []
        if heavy:
            raise InputError(
                f"the plan's groups have no ranks for layer `{name}`",
                hint="rows name every layer once, in the order of forward",
            )


class Line(nn.Sequential):  # type: ignore[misc]
    """Layers one after another; with `spread`, each element of a tuple is an argument of its own.

    nn.Sequential hands a tuple on as one.
    """

    def __init__(self, *, spread: bool) -> None:
        super().__init__()
        self.spread = spread

    def forward(self, *inputs: Any) -> Any:
        found: Any = inputs if self.spread or len(inputs) > 1 else inputs[0]
        for layer in self:
            found = layer(*found) if self.spread else layer(found)
            found = found if not self.spread or isinstance(found, tuple) else (found,)
        return found[0] if self.spread and len(found) == 1 else found


def _line(known: Mapping[str, Module], names: Sequence[str], spread: bool) -> Module:
    """Some layers one after another, each under the name it has in the whole model."""
    made = Line(spread=spread)
    for name in names:
        box, (*path, last) = made, name.split(".")
        for part in path:
            if part not in box._modules:
                box.add_module(part, nn.Sequential())
            box = box.get_submodule(part)
        box.add_module(last, known[name])
    return made


def together(stages: Mapping[int, Module]) -> Module:
    """Stages as one module, parameters under the names they have in the whole model."""
    each = list({id(m): m for m in stages.values()}.values())
    children = [pair for stage in each for pair in row(stage)]
    is_cut = all(isinstance(stage, nn.Sequential) for stage in each)
    if is_cut and len({name for name, _ in children}) == len(children):
        return nn.Sequential(OrderedDict(children))
    return nn.ModuleDict({str(s): m for s, m in stages.items()})


def stage_ends(
    held: Sequence[int],  # how many values the parameters of each child have
    num: int,
    layers: Sequence[int],  # of each stage; none: about as many parameters each
    *counted: Sequence[int],  # children that `layers` may count
) -> list[int]:
    """Behind which child each stage ends."""
    if not layers:
        return even_ends(held, num)
    for own in counted:
        if len(layers) == num and sum(layers) == len(own):
            marks = [*own, len(held)]
            return [*(marks[sum(layers[: s + 1])] for s in range(num - 1)), len(held)]
    raise InputError(
        f"layers={'+'.join(map(str, layers))} for {num} stages of "
        f"{' or '.join(str(len(own)) for own in counted)} blocks",
        hint="give one number for each stage; they add up to the blocks of the model",
    )


def even_ends(held: Sequence[int], num: int) -> list[int]:
    """Behind which child each stage ends: of about as many parameters each, none of them empty."""
    filled = [i for i, size in enumerate(held) if size]
    if len(filled) < num:
        raise InputError(f"{len(filled)} layers with parameters for {num} stages")
    ends, passed = [], 0.0
    total, upto = float(sum(held)), 0
    for stage in range(num - 1):
        most = filled[len(filled) - (num - 1 - stage)]  # leave a layer for each stage to come
        least = filled[stage] + 1
        while upto < most and (upto < least or passed + held[upto] / 2 < total * (stage + 1) / num):
            passed += held[upto]
            upto += 1
        while not held[upto]:  # what has no parameters stays with the layer before it
            upto += 1
        ends.append(upto)
    return [*ends, len(held)]


def size_of(module: Module) -> int:
    """How many values its parameters have."""
    return sum(p.numel() for p in module.parameters())
