"""What Inductor makes of a graph: its kernels, one by one, as it is about to write them.

    with noted() as notes:
        compiled(region, "cuda")
    notes[0]["loops"]

A note says of one kernel: `kind` (`loops`, `template`, `extern`, `nothing`), and of each of its
loop nests how many results (`n`) of how many places each (`r`), the ops inside with what they read
of one another, and every tensor read and written: its name, format, elements behind it, and the
stride of every loop. Notes are plain data, so that what is learned from them can change later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

Note = dict[str, Any]
# Ops that look at memory another way, or pick one of several results.
_SAME = (
    "view", "reshape", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "t",
    "transpose", "alias", "detach", "split", "split_with_sizes", "as_strided", "unbind", "getitem",
    "_unsafe_view", "_reshape_alias", "diagonal", "lift_fresh_copy",
)  # fmt: skip


@contextmanager
def noted() -> Iterator[list[Note]]:
    """Collect a note of every kernel compiled inside."""
    from torch._inductor.scheduler import Scheduler

    notes: list[Note] = []
    plain = Scheduler.codegen

    def codegen(self: Any) -> Any:
        notes.extend(_note(self, node) for node in self.nodes)
        return plain(self)

    Scheduler.codegen = codegen
    try:
        yield notes
    finally:
        Scheduler.codegen = plain


def _note(scheduler: Any, node: Any) -> Note:
    try:
        return _described(scheduler, node)
    except Exception as why:  # the inside of a compiler: a kernel without a note is left out
        return {"kind": "unknown", "why": f"{type(why).__name__}: {why}"[:120]}


def _described(scheduler: Any, node: Any) -> Note:
    if type(node).__name__.startswith("Nop"):
        return {"kind": "nothing"}
    if node.is_extern():
        return {"kind": "extern", **_extern(node)}
    inside = set(node.get_operation_names())
    parts = [n for n in node.get_nodes() if hasattr(n, "_body") and not n.is_template()]
    found: Note = {"kind": "template" if node.is_template() else "loops"}
    if node.is_template():
        found |= _extern(next(n for n in node.get_nodes() if n.is_template()))
    if type(node).__name__ == "FusedMixOrderReductions":
        found["mixed"] = 1
    if node.is_foreach():
        found["each"] = [len(n.get_nodes()) for n in node.snodes]
    return found | {"loops": [_loop(scheduler, part, inside) for part in parts]}


def _extern(node: Any) -> Note:
    """A library's kernel, or a product the compiler writes: what it is called with."""
    made = node.node
    name = getattr(made, "op_overload", None) or getattr(made, "python_kernel_name", None)
    origins = _ordered(made.get_origins() if hasattr(made, "get_origins") else made.origins)
    reads = sorted({d.name for d in node.read_writes.reads})
    return {
        "op": str(name),
        "ops": [[_word(n), _dtype(n), [], _shape(n)] for n in origins],
        "reads": [[r, *_tensor(r)] for r in reads],
        "writes": [[made.get_name(), *_tensor(made.get_name())]],
    }


def _loop(scheduler: Any, part: Any, inside: set[str]) -> Note:
    loops, reduced = ([int(n) for n in sizes] for sizes in part._sizes)
    ops, at = _ops(part.node)
    return {
        "n": prod(loops),
        "r": prod(reduced),
        "sizes": [loops, reduced],
        "how": str(getattr(part.node.data, "reduction_type", "") or ""),
        "hint": str(getattr(part.node.data, "reduction_hint", "") or "").rpartition(".")[2],
        "ops": ops,
        "reads": [_access(d, at) for d in part.read_writes.reads if hasattr(d, "var_names")],
        "writes": [
            [*_access(d, at), int(_leaves(scheduler, d.name, inside))]
            for d in part.read_writes.writes
            if hasattr(d, "var_names")
        ],
    }


def _leaves(scheduler: Any, name: str, inside: set[str]) -> bool:
    return not scheduler.can_buffer_be_removed_through_fusion(name, inside)


def _ops(made: Any) -> tuple[list[list[Any]], dict[str, list[int]]]:
    """The ops of a loop nest with the ops each reads; and which read what enters, by its name."""
    nodes = [n for n in _ordered(made.get_origins()) if _word(n) not in _SAME]
    number = {n: i for i, n in enumerate(nodes)}
    enters: dict[str, list[int]] = {}
    rows = []
    for i, n in enumerate(nodes):
        reads = []
        for source in n.all_input_nodes:
            seen = _seen(source)
            if seen in number:
                reads.append(number[seen])
            else:
                enters.setdefault(seen.name, []).append(i)
        rows.append([_word(n), _dtype(n), reads])
    return rows, enters


def _seen(node: Any) -> Any:
    """The op whose memory a view looks at."""
    while node.op == "call_function" and _word(node) in _SAME and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _ordered(origins: Any) -> list[Any]:
    nodes = [n for n in origins if n.op == "call_function"]
    if not nodes:
        return []
    order = {n: i for i, n in enumerate(nodes[0].graph.nodes)}
    return sorted(nodes, key=lambda n: order.get(n, -1))


def _word(node: Any) -> str:
    target = node.target
    return str(getattr(target, "__name__", target)).split(".")[0] if node.op else ""


def _value(node: Any) -> Any:
    value = node.meta.get("val")
    return value[0] if isinstance(value, (tuple, list)) and value else value


def _dtype(node: Any) -> str:
    return str(getattr(_value(node), "dtype", "")).removeprefix("torch.")


def _shape(node: Any) -> list[int]:
    return [int(n) for n in getattr(_value(node), "shape", ())]


def _tensor(name: str) -> list[Any]:
    """Format and elements of a buffer."""
    from torch._inductor.virtualized import V

    try:
        dtype = str(V.graph.get_dtype(name)).removeprefix("torch.")
        return [dtype, prod(int(n) for n in _sizes(V.graph, name))]
    except NotImplementedError:  # a kernel of several results has no format of its own
        return ["", 0]


def _sizes(graph: Any, name: str) -> Any:
    found = graph.get_buffer(name) if hasattr(graph, "get_buffer") else None
    found = found if found is not None else graph.graph_inputs[name]
    return found.get_size()


def _access(dep: Any, enters: dict[str, list[int]]) -> list[Any]:
    """A tensor read or written: name, format, elements, [size, stride] of loops, kind, readers."""
    from torch._inductor.virtualized import V

    strides = [dep.index.coeff(v) for v in dep.var_names]
    rest = dep.index - sum(c * v for c, v in zip(strides, dep.var_names, strict=True))
    loops = set(dep.var_names)
    odd = 2 if (rest.expand().free_symbols - loops) else int(bool(rest.expand().free_symbols))
    steps = [
        [int(n), int(c) if c.is_number else -1] for n, c in zip(dep.size, strides, strict=True)
    ]
    found = V.graph.get_buffer(dep.name)
    origin = getattr(found, "origin_node", None)
    names = [dep.name, *((origin.name, _seen(origin).name) if origin else ())]
    readers = next((enters[n] for n in names if n in enters), [])
    return [dep.name, *_tensor(dep.name), steps, odd, readers]
