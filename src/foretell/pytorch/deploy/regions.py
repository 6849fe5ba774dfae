"""Fused regions: what a plan fuses together is one compiled call, everything else stays eager.

A region of modules: one is compiled in place, several in a row in one nn.Sequential together.

A region of single ops is of a captured step, forward and loss traced together with their backward
(AOT autograd, static shapes): one node for each operator that eager PyTorch runs, in the order they
are issued, as `foretell.plan.plan` counts them. `mark` writes into nodes which region they are of
and which are put off; what is computed twice gets a node of its own. `split` cuts the joint graph
into forward and backward so that what a backward region recomputes is not kept. `rebuilt` makes
each region of either graph one call, and lets calls and ops run in the plan's order:

    turn of a call = that of its last op; ops put off come behind all others

A gradient is sent on as soon as it is there, in the middle of the backward, so that messages leave
while it goes on. A batch of other shapes is traced again. What depends on the data of a batch, not
on its shapes, is as it was in the trace.
"""

from __future__ import annotations

import copy
import heapq
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from foretell.errors import InputError, unknown
from foretell.plan import Plan
from foretell.plan.plan import COPY, made_for, named_ops, numbered, parameter_print
from foretell.pytorch.capture.words import inputs_of, op_word, shape_text
from foretell.pytorch.deploy.units import row
from foretell.pytorch.deploy.uses import untouched

Module = Any
Node = Any
TAG = "partitioner_tag"  # where AOT autograd writes the side of a node
# One operator, by the names it has with and without its buffers written in place.
_SAME = {
    "_native_batch_norm_legit_functional": "native_batch_norm",
    "_native_batch_norm_legit": "native_batch_norm",
    "cudnn_batch_norm": "native_batch_norm",
}
_UNMARKED = ("_unsafe_view", "_reshape_alias")  # views that do not say so
REGION, LATE = "foretell_region", "foretell_late"
Compile = Callable[[Any, Sequence[Any]], Callable[..., Any]]  # a graph and its inputs → a call
Tensor = Any
Ready = Callable[[str, Tensor], None]


def speaks_of_ops(plan: Plan, model: Module) -> bool:
    """Whether a plan fuses or orders single ops of a captured step, not whole modules."""
    known = dict(model.named_modules())
    return bool(plan.late) or any(name not in known for region in plan.regions for name in region)


def compile_regions(
    model: Module, regions: Sequence[Sequence[str]], *, backend: str = "inductor"
) -> None:
    """Compile each region of the model by itself."""
    rows: dict[str, list[list[str]]] = {}
    for region in regions:
        parent, names = refusable(model, region)
        if len(names) == 1:
            module = model.get_submodule(region[0])
            module.forward = torch.compile(module.forward, backend=backend)
        else:
            rows.setdefault(parent, []).append(names)
    for parent, runs in rows.items():
        box = model.get_submodule(parent)
        box.forward = nn.Sequential(*_segments(box, runs, backend)).forward


def refusable(model: Module, region: Sequence[str]) -> tuple[str, list[str]]:
    """The container of a region and its children there, or an error that says why not."""
    known = dict(model.named_modules(remove_duplicate=False))
    missing = [name for name in region if name not in known]
    if missing:
        raise InputError(
            f"region {'+'.join(region)} names `{missing[0]}`, which is no module of the model",
            hint="name modules as model.named_modules() does",
        )
    parents = {name.rpartition(".")[0] for name in region}
    if len(region) > 1 and (len(parents) > 1 or not isinstance(known[min(parents)], nn.Sequential)):
        raise InputError(f"region {'+'.join(region)} is not in one nn.Sequential")
    parent = min(parents)
    names = [name.rpartition(".")[2] for name in region]
    if len(region) > 1:
        order = [n for n, _ in row(known[parent])]
        first = order.index(names[0])
        if order[first : first + len(names)] != names:
            raise InputError(f"region {'+'.join(region)} is not one row of modules")
    return parent, names


def _segments(box: nn.Sequential, runs: list[list[str]], backend: str) -> list[Any]:
    """The children of a container, each run of a region as one compiled call."""
    first = {run[0]: run for run in runs}
    inside = {name for run in runs for name in run[1:]}
    found: list[Any] = []
    for name, child in row(box):
        if name in first:
            run = nn.Sequential(*(box.get_submodule(n) for n in first[name]))
            found.append(torch.compile(run, backend=backend))
        elif name not in inside:
            found.append(child)
    return found


def is_op(node: Node) -> bool:
    """Whether a node is an operator."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def is_backward(node: Node) -> bool:
    """Whether a node is of the backward."""
    return bool(node.meta.get(TAG) == "is_backward")


def is_item(node: Node) -> bool:
    """Whether a node is one of several results."""
    return node.op == "call_function" and node.target is operator.getitem


def is_free(node: Node) -> bool:
    """Whether a node only looks at memory: a view, or one of several results."""
    if is_item(node):
        return True
    if not is_op(node):
        return False
    results = node.target._schema.returns
    aliases = [r.alias_info is not None and not r.alias_info.is_write for r in results]
    return any(aliases) or _word(node) in _UNMARKED


def named_nodes(graph: Any) -> dict[str, Node]:
    """Every operator of a joint graph by its name in a plan."""
    count: Counter[str] = Counter()
    return {numbered(_word(n), is_backward(n), count): n for n in graph.nodes if is_op(n)}


def _word(node: Node) -> str:
    name = node.target._schema.name.partition("::")[2]
    return _SAME[name] if name in _SAME else op_word(node.target)


def sizes_given(node: Node) -> str:
    """The sizes of what an op is given, as a capture writes them."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    text = shape_text(node.target, inputs_of(node.target, args, kwargs))
    return next((part[3:] for part in text.split(",") if part.startswith("in=")), "")


def require_parameters(plan: Plan, model: Any) -> None:
    """Raise where a plan was made for other parameters than those of the model."""
    if "." not in plan.model:
        return
    own = parameter_print(
        {n: p.numel() * p.element_size() for n, p in model.named_parameters() if p.requires_grad}
    )
    wanted = plan.model.partition(".")[0]
    if own != wanted:
        raise InputError(
            f"the plan was made for parameters {wanted}; those of this model are {own}",
            hint="`foretell capture` this script again, and plan again",
        )


def require_ops(plan: Plan, nodes: Mapping[str, Node]) -> None:
    """Raise where a plan speaks of ops that the step does not run, or runs on other sizes."""
    names = named_ops(plan.regions, plan.late)
    for name in names:
        if name not in nodes:
            raise unknown("op in the plan", name, nodes)
    _require_sides(plan, nodes)
    parameters = plan.model.partition(".")[0]
    sizes = {name: sizes_given(nodes[name]) for name in names}
    if plan.model and plan.model != made_for(parameters, list(sizes.items())):
        shown = ", ".join(f"{n} of {size}" for n, size in list(sizes.items())[:3])
        raise InputError(
            f"the plan's ops are given other sizes here: {shown} …",
            hint="capture with the batch that a rank has, and --kernels-of what it runs on (cpu)",
        )


def _require_sides(plan: Plan, nodes: Mapping[str, Node]) -> None:
    """Raise unless each region is of one side and each op in one region."""
    seen: set[str] = set()
    for region in plan.regions:
        own = [name for name in region if not name.endswith(COPY)]
        if len({is_backward(nodes[name]) for name in own}) > 1:
            raise InputError(
                f"the region {'+'.join(region)} spans forward and backward",
                hint=f"write `{own[0]}{COPY}` for what the backward recomputes",
            )
        again = [name for name in own if name in seen]
        if again:
            raise InputError(f"`{again[0]}` is in several regions of the plan")
        seen |= set(own)


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
    from torch._functorch.partitioners import _extract_fwd_bwd_modules  # loads torch's compiler

    return _extract_fwd_bwd_modules(  # type: ignore[no-any-return]
        joint, kept, [], num_fwd_outputs=num_fwd_outputs, static_lifetime_input_nodes=static
    )


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
    waits: dict[Any, set[Any]] = {}
    for at, unit in units.items():
        read = (n for node in unit for n in node.all_input_nodes if n.op != "placeholder")
        waits[at] = {_unit(n) for n in read} - {at}
    return [units[at] for at in _sorted(units, turn, waits)]


def _unit(node: Node) -> Any:
    return node.meta.get(REGION, node)


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


def inductor(graph: Any, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """A region compiled by Inductor, in a thread that knows nothing of the step under way."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_compiled, graph, [x.detach() for x in inputs]).result()


def _compiled(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compiled; random numbers are drawn as eager PyTorch draws them."""
    with (
        torch.no_grad(),
        torch._inductor.config.patch(fallback_random=True),
        warnings.catch_warnings(action="ignore"),
    ):
        found: Callable[..., Any] = torch._inductor.standalone_compile(
            graph, inputs, dynamic_shapes="from_example_inputs"
        )
    return found


class _Whole(torch.nn.Module):  # type: ignore[misc]
    """Model and loss as one module; hooks of the model itself are called outside the trace."""

    def __init__(self, model: Any, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: tuple[Tensor, ...], target: Tensor | None) -> Tensor:
        return self.loss(self.model.forward(*inputs), target)


class FusedStep:
    """Forward and loss of a model, fused by a plan; `backward()` of what it gives is fused too."""

    def __init__(
        self,
        model: Any,
        loss: Callable[[Any, Any], Any],
        plan: Plan,
        *,
        ready: Ready | None = None,  # called with the name and gradient of each parameter
        compile_region: Compile = inductor,
    ) -> None:
        self.model, self.plan, self.ready, self.compile_region = model, plan, ready, compile_region
        self.whole = _Whole(model, loss)
        self.names = [n.removeprefix("model.") for n, _ in self.whole.named_parameters()]
        self.traced: dict[Any, Callable[..., Tensor]] = {}
        self.is_checked = False

    def __call__(self, inputs: tuple[Tensor, ...], target: Tensor | None) -> Tensor:
        """The loss of a batch."""
        key = (self.model.training, *map(_look, (*inputs, target)))
        if key not in self.traced:
            self.traced[key] = self._trace()
        for hook in list(self.model._forward_pre_hooks.values()):
            hook(self.model, inputs)
        return self.traced[key](inputs, target)

    def prepare(self, inputs: tuple[Tensor, ...], target: Tensor | None) -> None:
        """Trace and compile for a batch, leaving buffers and random numbers as they were."""
        with torch.random.fork_rng(), untouched(self.model):
            self(inputs, target)

    def _trace(self) -> Callable[..., Tensor]:
        from functorch.compile import (  # type: ignore[import-untyped]  # torch's compiler
            aot_module,
            make_boxed_func,
        )

        def forward(module: Any, _: Any) -> Any:
            return make_boxed_func(rebuilt(module, self.compile_region))

        def backward(module: Any, _: Any) -> Any:
            return make_boxed_func(rebuilt(module, self.compile_region, self.names, self.ready))

        found: Callable[..., Tensor] = aot_module(
            self.whole, forward, backward, partition_fn=self._cut
        )
        return found

    def _cut(self, joint: Any, _: Any, *, num_fwd_outputs: int, **more: Any) -> tuple[Any, Any]:
        nodes = named_nodes(joint.graph)
        if not self.is_checked:  # later batches may be smaller; the first is what was planned for
            require_ops(self.plan, nodes)
            self.is_checked = True
        mark(joint.graph, self.plan, nodes)
        return split(joint, num_fwd_outputs, more.get("static_lifetime_input_nodes"))


def _look(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return value
