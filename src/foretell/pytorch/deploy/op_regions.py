"""Regions of ops in a traced step: marked in the joint graph, cut out and put in the plan's order.

`mark` writes into nodes which region they are of and which are put off; what is computed twice gets
a node of its own. `split` cuts the joint graph into forward and backward so that what a backward
region recomputes is not kept. `rebuilt` makes each region of either graph one call, and lets
calls and ops run in the plan's order:

    turn of a call = that of its last op; ops put off come behind all others
"""

from __future__ import annotations

import copy
import heapq
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import _extract_fwd_bwd_modules

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.plan.file import COPY
from foretell.pytorch.deploy.traced import TAG, is_backward, is_free, is_item

Node = Any
REGION, LATE = "foretell_region", "foretell_late"


def mark(graph: Any, plan: Plan, nodes: Mapping[str, Node]) -> None:
    """Write a plan's regions and order into a joint graph."""
    for node in graph.nodes:
        if is_item(node):  # of the side that made it
            node.meta[TAG] = node.args[0].meta.get(TAG)
    turn = {node: k for k, node in enumerate(graph.nodes)}
    for number, region in enumerate(plan.regions):
        inside = {nodes[name] for name in region if not name.endswith(COPY)}
        twice = [nodes[name.removesuffix(COPY)] for name in region if name.endswith(COPY)]
        for node in sorted(twice, key=turn.__getitem__, reverse=True):  # copies may read copies
            inside |= _copied(graph, node, inside)
        for node in inside | _between(inside):
            node.meta[REGION] = number
    for name in plan.late:
        nodes[name].meta[LATE] = True


def _between(inside: set[Node]) -> set[Node]:
    """Views that lie between nodes of a region, and single results of its nodes."""
    found: set[Node] = set()
    for node in inside:
        for user in node.users:
            found |= _views_to(user, inside)
            if is_item(user):
                found |= {user} | {n for far in user.users for n in _views_to(far, inside)}
    return found


def _views_to(node: Node, inside: set[Node]) -> set[Node]:
    """The views from a node on that end in a region; none where they do not."""
    if node in inside or not is_free(node):
        return set()
    found = set[Node]()
    for user in node.users:
        more = _views_to(user, inside)
        if user in inside or more:
            found |= {node} | more
    return found


def _copied(graph: Any, node: Node, inside: set[Node]) -> set[Node]:
    """A copy of an op, and of the views behind it, for those of a region that read it."""
    views = {v for user in node.users for v in _views_to(user, inside)}
    chain = [n for n in graph.nodes if n is node or n in views]
    order = {n: k for k, n in enumerate(graph.nodes)}
    readers = [u for n in chain for u in n.users if u in inside]
    if not readers:
        raise InputError(f"nothing in the region of `{node.name}` reads it")
    first = min(readers, key=order.__getitem__)
    twin: dict[Node, Node] = {}
    for old in chain:
        with graph.inserting_before(first):
            new = graph.node_copy(old, lambda n: twin.get(n, n))
        new.meta = {**copy.copy(old.meta), TAG: first.meta.get(TAG)}
        twin[old] = new
    for old, new in twin.items():
        for reader in [u for u in old.users if u in inside]:
            reader.replace_input_with(old, new)
    return set(twin.values())


def split(joint: Any, num_fwd_outputs: int, static: Any = None) -> tuple[Any, Any]:
    """Forward and backward; kept is what the backward reads, and nothing it recomputes."""
    kept = [
        n for n in joint.graph.nodes
        if n.op in ("placeholder", "call_function") and not is_backward(n)
        and "tangents" not in n.name
        and any(is_backward(user) for user in n.users)
    ]  # fmt: skip
    return _extract_fwd_bwd_modules(  # type: ignore[no-any-return]
        joint, kept, [], num_fwd_outputs=num_fwd_outputs, static_lifetime_input_nodes=static
    )


Compile = Callable[[Any, Sequence[Any]], Callable[..., Any]]  # a graph and its inputs → a call


class Region(torch.nn.Module):  # type: ignore[misc]
    """One region, compiled by itself when it is first called."""

    def __init__(self, graph: Any, compile_region: Compile) -> None:
        super().__init__()
        self.inner, self.compile_region = graph, compile_region
        self.made: Callable[..., Any] | None = None

    def forward(self, *args: Any) -> Any:
        if self.made is None:
            self.made = self.compile_region(self.inner, args)
        return self.made(*args)


class GradientReadyHook(torch.nn.Module):  # type: ignore[misc]
    """Says that a gradient is there."""

    def __init__(self, name: str, ready: Callable[[str, Any], None]) -> None:
        super().__init__()
        self.name, self.ready = name, ready

    def forward(self, gradient: Any) -> None:
        self.ready(self.name, gradient)


def rebuilt(
    module: Any,
    compile_region: Compile,
    gradients: Sequence[str] = (),  # names of the first outputs, in a backward
    ready: Callable[[str, Any], None] | None = None,
) -> Any:
    """The same graph in the plan's order, regions as calls; `ready` gets each gradient."""
    old, root = module.graph, torch.nn.Module()
    outputs = next(n for n in old.nodes if n.op == "output").args[0]
    wanted: dict[Node, list[str]] = {}
    for name, node in zip(gradients, outputs, strict=False):
        if isinstance(node, fx.Node) and ready is not None:
            wanted.setdefault(node, []).append(name)
    graph, env = fx.Graph(), dict[Node, Node]()
    for node in (n for n in old.nodes if n.op == "placeholder"):
        env[node] = graph.node_copy(node)
        _tell(root, graph, env, wanted.get(node, ()), node, ready)
    for unit in _ordered(old):
        _write(root, graph, env, unit, compile_region)
        for node in unit:
            _tell(root, graph, env, wanted.get(node, ()), node, ready)
    graph.output(fx.node.map_arg(outputs, env.__getitem__))
    for node in old.nodes:
        if node.op == "get_attr":
            setattr(root, node.target, getattr(module, node.target))
    return fx.GraphModule(root, graph)


def _tell(
    root: Any, graph: Any, env: Mapping[Node, Node], names: Iterable[str], node: Node, ready: Any
) -> None:
    for name in names:
        place = f"gradient_{name.replace('.', '_')}"
        root.add_module(place, GradientReadyHook(name, ready))
        graph.call_module(place, (env[node],))


def _write(
    root: Any, graph: Any, env: dict[Node, Node], unit: list[Node], compile_region: Compile
) -> None:
    """One op, or one region as a call."""
    number = unit[0].meta.get(REGION)
    if number is None:
        env[unit[0]] = graph.node_copy(unit[0], env.__getitem__)
        return
    inner, entering, leaving = _cut_out(unit)
    place = f"region_{number}"
    root.add_module(place, Region(inner, compile_region))
    call = graph.call_module(place, tuple(env[n] for n in entering))
    for k, node in enumerate(leaving):
        env[node] = graph.call_function(operator.getitem, (call, k))


def _cut_out(unit: list[Node]) -> tuple[Any, list[Node], list[Node]]:
    """A region as a graph of its own, what enters it, and what leaves it."""
    inside = set(unit)
    entering = list(dict.fromkeys(n for u in unit for n in u.all_input_nodes if n not in inside))
    leaving = [u for u in unit if any(user not in inside for user in u.users)]
    graph, env = fx.Graph(), dict[Node, Node]()
    for node in entering:
        env[node] = graph.placeholder(node.name)
    for node in unit:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = {}  # of another trace
    graph.output(tuple(env[n] for n in leaving))
    return fx.GraphModule(torch.nn.Module(), graph), entering, leaving


def _ordered(graph: Any) -> list[list[Node]]:
    """Ops and regions in the order they run: each in the turn of its last op, behind its inputs."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    units: dict[Any, list[Node]] = {}
    turn: dict[Any, int] = {}
    for k, node in enumerate(nodes):
        at = _unit(node)
        units.setdefault(at, []).append(node)
        turn[at] = max(turn.get(at, 0), k + len(nodes) * bool(node.meta.get(LATE)))
    waits = {at: _waits(unit, at) for at, unit in units.items()}
    return [units[at] for at in _sorted(units, turn, waits)]


def _unit(node: Node) -> Any:
    return node.meta.get(REGION, node)


def _waits(unit: list[Node], own: Any) -> set[Any]:
    read = (n for node in unit for n in node.all_input_nodes if n.op != "placeholder")
    return {_unit(n) for n in read} - {own}


def _sorted(
    units: Mapping[Any, list[Node]], turn: Mapping[Any, int], waits: Mapping[Any, set[Any]]
) -> list[Any]:
    """Earliest turn first, of those that wait for nothing any more; an error where a ring is."""
    left = {at: len(w) for at, w in waits.items()}
    behind: dict[Any, list[Any]] = {at: [] for at in units}
    for at, many in waits.items():
        for before in many:
            behind[before].append(at)
    by_turn = {turn[at]: at for at in units}
    heap = [turn[at] for at, many in left.items() if not many]
    heapq.heapify(heap)
    done: list[Any] = []
    while heap:
        done.append(by_turn[heapq.heappop(heap)])
        for at in behind[done[-1]]:
            left[at] -= 1
            if not left[at]:
                heapq.heappush(heap, turn[at])
    stuck = [units[at] for at in units if left[at] and len(units[at]) > 1]
    if len(done) < len(units):
        names = ", ".join(f"`{n.name}`" for n in (stuck or [[]])[0][:6])
        raise InputError(f"the region of {names} waits for itself by way of an op outside it")
    return done
