"""The pieces of a model that are handled one by one: sharded, recomputed, cut into stages.

A model's units are the children of its largest container (nn.Sequential, nn.ModuleList, or an
nn.ModuleDict with numbers for keys) that have parameters: the blocks of a transformer, the layers
of a plain network.

A model's forward, traced once and cut into stages: no class of the user's has to be changed.

Modules that a plan names are calls of their own; what is between them belongs to the one before,
except where branches join: that belongs to the one behind. What stands before the first is `input`,
what stands behind the last is `head`. Each stage is a module with the parameters under their own
names; it takes what other stages hand it and, behind that, what it `reads` of the batch.
"""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import fx, nn

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


def cut_line(model: Module, num: int, layers: Sequence[int] = ()) -> list[Module]:
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
    behind, unnamed = 0, list[str]()
    for (first, last), (start, end) in zip(rows, spans, strict=True):
        if start < behind or end < start:
            raise InputError(
                f"the plan's layers go on with `{first}` to `{last}`; "
                f"the model has them in another order: {', '.join(known)}",
                hint="rows name every layer once, in the order of forward",
            )
        unnamed += names[behind:start]
        behind = end + 1
    for name in (*unnamed, *names[behind:]):  # a plan need not name what has no matrix
        if name in known and any(p.dim() > 1 for p in known[name].parameters()):
            raise InputError(
                f"the plan's groups have no ranks for layer `{name}`",
                hint="rows name every layer once, in the order of forward",
            )
    at, spread = [0, *(start for start, _ in spans[1:])], not isinstance(model, nn.Sequential)
    ends = [*at[1:], len(known)]
    return [_line(known, names[a:b], spread) for a, b in zip(at, ends, strict=True)]


def _found(names: Sequence[str], wanted: str) -> list[int]:
    """Places of the layers that a name stands for: its own, or all inside it."""
    at = [i for i, n in enumerate(names) if n == wanted or n.startswith(f"{wanted}.")]
    if not at:
        raise unknown("layer in the plan's groups", wanted, names)
    return at


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


FIRST, LAST = "input", "head"  # what is in no module that is named
Node = Any


class _Tracer(fx.Tracer):  # type: ignore[misc]
    """Stops at the modules that a plan may name; torch's own are calls as ever."""

    def __init__(self, is_unit: Callable[[str], bool]) -> None:
        super().__init__()
        self.is_unit = is_unit

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return self.is_unit(module_qualified_name) or super().is_leaf_module(
            m, module_qualified_name
        )


@dataclass
class Traced:
    """Calls in order, and the layer each belongs to."""

    model: Module
    graph: Any
    units: list[str]  # modules that were named, in the order of their calls
    home: dict[Node, str] = field(default_factory=dict)
    free: set[Node] = field(default_factory=set)  # made of the batch alone: done where it is used

    @property
    def inputs(self) -> list[Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"]


def trace(model: Module, names: Sequence[str]) -> Traced:
    """The calls of a model's forward, cut at modules of those names and at others like them."""
    known = dict(model.named_modules())
    for name in names:
        if name not in known and name not in (FIRST, LAST):
            raise unknown("layer of the plan among the model's modules", name, known)
    # any numbers in the places of its own
    parts = [n.split(".") for n in names if n not in (FIRST, LAST)]
    wanted = [
        re.compile(r"\.".join(r"\d+" if p.isdigit() else re.escape(p) for p in one))
        for one in parts
    ]
    tracer = _Tracer(lambda path: any(p.fullmatch(path) for p in wanted))
    try:
        with _lengths(model):
            given = inspect.signature(model.forward).parameters.values()
            graph = tracer.trace(
                model, {p.name: p.default for p in given if p.default is not p.empty}
            )
    except Exception as error:
        raise InputError(
            f"the forward of {type(model).__name__} cannot be traced: {error}",
            hint="let its own forward only call modules and plain functions, "
            "and leave what depends on values to the modules",
        ) from None
    calls = [n.target for n in graph.nodes if n.op == "call_module"]
    units = list(dict.fromkeys(c for c in calls if tracer.is_unit(c)))
    made = Traced(model, graph, units)
    _settle(made)
    return made


@contextmanager
def _lengths(model: Module) -> Iterator[None]:
    """Let `len` of what is traced be a call of the graph, in every forward of the model's own."""
    spaces = {}
    for module in model.modules():
        space = getattr(type(module).forward, "__globals__", None)
        if space is not None and not type(module).__module__.startswith("torch."):
            spaces[id(space)] = space
    with ExitStack() as stack:
        for space in spaces.values():
            stack.enter_context(patch.dict(space, {"len": _len}))
        yield


def _len(x: Any) -> Any:
    if isinstance(x, fx.Proxy):
        return x.tracer.create_proxy("call_function", len, (x,), {})
    return len(x)


def _settle(made: Traced) -> None:
    """Find the layer of every call."""
    behind: dict[Node, frozenset[str]] = {}  # layers that lead up to a call, its own included
    late: list[Node] = []
    here, order = FIRST, {FIRST: -1, LAST: len(made.units)}
    order |= {u: k for k, u in enumerate(made.units)}
    for node in made.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        is_plain = node.op in ("call_function", "call_method")
        given = node.all_input_nodes
        if is_plain and all(n.op == "placeholder" or n in made.free for n in given):
            made.free.add(node)  # it needs nothing but the batch: shapes, masks, places
            continue
        before = [n for n in given if n in behind]
        if node.op == "call_module" and node.target in made.units:
            home = here = node.target
        else:
            homes = (made.home[n] for n in before)  # of those it reads from, the last
            home = LAST if node.op == "output" else max(homes, key=order.__getitem__, default=here)
            if made.units and home == made.units[-1]:
                home = LAST
            if node.op != "output" and _joins(made, before, behind, late, home):
                late.append(node)
        made.home[node] = home
        behind[node] = frozenset({home}).union(*(behind[n] for n in before))
    for node in reversed(late):  # where branches join: with whatever reads it first
        readers = [n for n in node.users if n in made.home]
        made.home[node] = made.home[readers[0]] if readers else LAST


def _joins(
    made: Traced,
    before: Sequence[Node],
    behind: Mapping[Node, frozenset[str]],
    late: Sequence[Node],
    home: str,
) -> bool:
    """Whether a call brings together what does not lead up to one another."""
    others = [n for n in before if made.home[n] != home]
    leads = frozenset[str]().union(*(behind[n] for n in before if n not in others))
    # what stands behind the last module reads from wherever it likes
    return any(n in late for n in before) or (
        home != LAST and not {made.home[n] for n in others} <= leads
    )


@dataclass(frozen=True)
class Cut:
    """A model in stages: their modules are made when asked for."""

    traced: Traced
    stage: Mapping[str, int]  # of each layer
    after: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[Node, ...], ...]  # of each stage, for others
    reads: tuple[tuple[int, ...], ...]  # places in the batch

    def module(self, stage: int) -> Module:
        """The module of one stage."""
        made = self.traced
        graph, copies = fx.Graph(), dict[Node, Node]()
        for before in self.after[stage]:
            for node in self.outputs[before]:
                copies[node] = graph.placeholder(node.name)
        for place in self.reads[stage]:
            copies[made.inputs[place]] = graph.placeholder(made.inputs[place].name)
        for node in _mine(made, self.stage, stage):
            _copied(graph, node, copies)
        if self.stage[LAST] == stage:
            (end,) = (n for n in made.graph.nodes if n.op == "output")
            for node in end.all_input_nodes:
                _copied(graph, node, copies)
            graph.output(fx.node.map_arg(end.args[0], copies.__getitem__))
        else:
            given = tuple(copies[n] for n in self.outputs[stage])
            graph.output(given[0] if len(given) == 1 else given)
        found = fx.GraphModule(made.model, graph)
        found.reads = self.reads[stage]
        return found

    def layers(self, stage: int) -> list[str]:
        """The named modules of a stage."""
        return [u for u in self.traced.units if self.stage[u] == stage]


def cut(traced: Traced, stage: Mapping[str, int], num: int) -> Cut:
    """The stages of a traced model, given the stage of each of its layers."""
    homes = [_mine(traced, stage, s) for s in range(num)]
    at = {node: s for s, nodes in enumerate(homes) for node in nodes}
    homes[stage[LAST]] += [n for n in traced.graph.nodes if n.op == "output"]
    outputs: list[dict[Node, None]] = [{} for _ in range(num)]
    after: list[set[int]] = [set() for _ in range(num)]
    reads: list[set[int]] = [set() for _ in range(num)]
    for s, nodes in enumerate(homes):
        for need in {n: None for node in nodes for n in _needs(traced, node)}:
            if need.op == "placeholder":
                reads[s].add(traced.inputs.index(need))
            elif at[need] != s:
                outputs[at[need]][need] = None
                after[s].add(at[need])
    _check(sorted(set(stage.values())), after, outputs, stage[LAST])
    return Cut(
        traced,
        stage,
        tuple(tuple(sorted(a)) for a in after),
        tuple(tuple(o) for o in outputs),
        tuple(tuple(sorted(r)) for r in reads),
    )


def in_stages(model: Module, num: int, layers: Sequence[int] = ()) -> Cut:
    """Any model whose forward can be traced in so many stages, of about as many parameters each.

    `layers` says how many of its blocks each stage has.
    """
    blocks = [name for name in units(model) if name]
    inside = {name.split(".")[0] for name in blocks}
    others = [n for n, m in model.named_children() if n not in inside and size_of(m)]
    traced = trace(model, [*blocks, *others])
    found = [u for u in traced.units if size_of(model.get_submodule(u))]
    if len(found) < num:
        raise InputError(f"{len(found)} layers with parameters for {num} stages")
    held = [size_of(model.get_submodule(u)) for u in found]
    ends = stage_ends(held, num, layers, [k for k, u in enumerate(found) if u in blocks])
    stage = {u: sum(k >= end for end in ends[:-1]) for k, u in enumerate(found)}
    at = 0
    for unit in traced.units:  # what has no parameters goes with the layer before
        at = stage.setdefault(unit, at)
    return cut(traced, {FIRST: 0, LAST: num - 1} | stage, num)


def _check(
    stages: Sequence[int], after: Sequence[set[int]], outputs: Sequence[dict[Node, None]], last: int
) -> None:
    for s in stages:
        if any(b > s for b in after[s]):
            raise InputError(
                f"stage {s} of the plan would read from stage {max(after[s])}, which is after it",
                hint="make the plan from this very script: foretell schedule SCRIPT --on CLUSTER",
            )
        if not outputs[s] and s != last:
            raise InputError(f"what stage {s} of the plan computes is used by no other stage")


def _mine(made: Traced, stage: Mapping[str, int], at: int) -> list[Node]:
    """The calls of one stage, in order."""
    nodes = [n for n in made.graph.nodes if n in made.home and n.op != "output"]
    return [n for n in nodes if stage[made.home[n]] == at]


def _needs(made: Traced, node: Node) -> Iterator[Node]:
    """What a call reads: other calls, and of the batch what it takes through free ones."""
    for one in node.all_input_nodes:
        if one in made.free:
            yield from _needs(made, one)
        elif one.op != "get_attr":
            yield one


def _copied(graph: Any, node: Node, copies: dict[Node, Node]) -> Node:
    """A call in a graph of its own, what is free or a parameter along with it."""
    if node not in copies:
        for one in node.all_input_nodes:
            _copied(graph, one, copies)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies[node]
