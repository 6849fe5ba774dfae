"""From a recorded step to a workload: rows, roles, units, layers, and what was not understood.

Where a recorded step is cut into layers: by modules or by what repeats; branches and their
joins.

A unit is what runs inside one numbered module (`h.3`, `layer1.0`, `features.5`); one that is made
of numbered modules which themselves hold several matmuls is taken apart (`layers.0.blocks.1`).
Where nothing is numbered (a trace, or a model written in one piece), the longest stretch of calls
that repeats with equal shapes is what is cut (→ `repeats`).

Units that do not simply follow one another: branches, where they join, and what looks back. Rows in
no numbered module go with the unit before them. Here those that begin anew, from the batch alone,
become a unit of their own (the words of a decoder, the patches beside the words), and those that
bring branches together go with the unit behind. Then each unit knows whom it reads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foretell.graph import Graph
from foretell.workload.captured.ops import Model, Piece, fused, image_of, pieces_of
from foretell.workload.captured.roles import Roles, is_linear, is_through, roles_of
from foretell.workload.captured.rows import (
    PRODUCTS,
    ForwardCall,
    batch_of,
    is_captured,
    mark_live,
    rows_of,
)
from foretell.workload.captured.weights import Weight, assign
from foretell.workload.models import transformer
from foretell.workload.models.cnn import splits_of
from foretell.workload.workload import Layer, Op, Tensor, Workload

Runs = list[tuple[str, list[int]]]
LITTLE = 0.1  # of the largest tensor a unit reads: masks and the like are not worth a message
SOME = 0.4  # of all matmuls that what repeats must hold
SHARE = 0.9  # of a module's matmuls that its numbered parts must hold before it is taken apart


@dataclass(frozen=True)
class Unit:
    """Rows of one layer, and the units it reads; none where that is the one before."""

    name: str
    rows: tuple[int, ...]
    after: tuple[int, ...] = ()
    is_source: bool = False  # reads the batch alone, and is not the first
    is_numbered: bool = True
    is_read_later: bool = False  # by another than the next


def branched(runs: Runs, rows: Sequence[ForwardCall]) -> list[Unit]:
    """The units of runs of rows, with whom they read; a plain chain stays as it is."""
    moved = _joined_later(_begun_anew(runs, rows), rows)
    home = {i: k for k, (_, mine) in enumerate(moved) for i in mine}
    reads = [_reads(mine, home, k, rows) for k, (_, mine) in enumerate(moved)]
    if all(r == {k - 1} or not k for k, r in enumerate(reads)):
        return [Unit(name, tuple(mine), (), False, bool(name)) for name, mine in runs]
    numbered = {name for name, _ in runs}
    late = {j for k, r in enumerate(reads) for j in r if j != k - 1}
    return [
        Unit(
            name,
            tuple(mine),
            () if reads[k] == {k - 1} else tuple(sorted(reads[k])),
            is_source=bool(k) and not reads[k],
            is_numbered=bool(name) and name in numbered,
            is_read_later=k in late,
        )
        for k, (name, mine) in enumerate(moved)
    ]


def _begun_anew(runs: Runs, rows: Sequence[ForwardCall]) -> Runs:
    """Runs cut where a module that is in no unit reads nothing of what was made before."""
    out: Runs = []
    for name, mine in runs:
        tail = _tail(name, mine, rows) if name else []
        at = next((k for k, i in enumerate(tail) if _is_new(tail[k:], i, rows)), None)
        if at is None:
            out.append((name, mine))
            continue
        own = rows[tail[at]].path
        out += [(name, mine[: mine.index(tail[at])]), (own, mine[mine.index(tail[at]) :])]
    return out


def _tail(name: str, mine: Sequence[int], rows: Sequence[ForwardCall]) -> list[int]:
    """The rows of a run behind its module."""
    inside = [i for i in mine if f"{rows[i].path}.".startswith(f"{name}.")]
    return [i for i in mine if inside and i > inside[-1]]


def _is_new(tail: Sequence[int], first: int, rows: Sequence[ForwardCall]) -> bool:
    """Whether what follows is fed by the batch and by nothing that a layer made."""
    row = rows[first]
    if not row.path or not row.live or not row.weights:
        return False
    return not any(rows[j].live and rows[j].weights for j in _upstream([first], rows))


def _upstream(starts: Iterable[int], rows: Sequence[ForwardCall]) -> set[int]:
    found: set[int] = set()
    left = [j for i in starts for j in rows[i].after]
    while left:
        j = left.pop()
        if j not in found:
            found.add(j)
            left += rows[j].after
    return found


def _joined_later(runs: Runs, rows: Sequence[ForwardCall]) -> Runs:
    """Runs whose last rows bring branches together hand those to the next run."""
    out: Runs = []
    carry: list[int] = []
    for at, (name, given) in enumerate(runs):
        mine = [*carry, *given]
        tail = _tail(name, mine, rows) if name and at + 1 < len(runs) else []
        own = _upstream([i for i in given if i not in tail], rows) | set(given)
        first = next((k for k, i in enumerate(tail) if _brings(i, own, rows)), len(tail))
        carry = tail[first:]
        out.append((name, [i for i in mine if i not in carry]))
    return out


def _brings(at: int, own: set[int], rows: Sequence[ForwardCall]) -> bool:
    """Whether a row reads what did not lead up to its unit."""
    return any(rows[j].live and j not in own for j in rows[at].after)


def _reads(
    mine: Sequence[int], home: dict[int, int], k: int, rows: Sequence[ForwardCall]
) -> set[int]:
    """The units whose results one reads; masks and the like are made anew from the batch."""
    sizes: dict[int, float] = {}
    for i in mine:
        for j in rows[i].after:
            if rows[j].learned and home.get(j, k) != k:
                sizes[home[j]] = max(sizes.get(home[j], 0.0), rows[j].size)
    most = max(sizes.values(), default=0.0)
    return {unit for unit, size in sizes.items() if size >= LITTLE * most}


def units_of(rows: Sequence[ForwardCall]) -> list[tuple[str, list[int]]]:
    """Names and rows of the layers in order; what is not numbered has an empty name."""
    names = _names(rows)
    if not any(names):
        names = repeats(rows)
    if not any(names):
        names = _narrows(rows)
    runs: list[tuple[str, list[int]]] = []
    for at, name in enumerate(names):
        if not runs or (name and name != runs[-1][0]):
            runs.append((name, [at]))
        else:
            runs[-1][1].append(at)
    return _joined(_with_ends(runs, names), rows)


def is_heavy(row: ForwardCall) -> bool:
    """Whether it has weights that are multiplied with."""
    return row.op == "convolution" or is_linear(row) or "_rnn" in row.op


def _names(rows: Sequence[ForwardCall]) -> list[str]:
    """For each row the numbered module it is in."""
    paths = [row.path.split(".") for row in rows]
    depth = [_numbered(parts, 0) for parts in paths]
    names = [".".join(p[:d]) for p, d in zip(paths, depth, strict=True)]
    for name in dict.fromkeys(filter(None, names)):
        mine = [i for i, n in enumerate(names) if n == name]
        inner = {i: ".".join(paths[i][: _numbered(paths[i], depth[i])]) for i in mine}
        if _is_made_of(mine, inner, rows):
            for i in mine:
                names[i] = inner[i] or name
    return names


def _numbered(parts: Sequence[str], start: int) -> int:
    """Where the next numbered module ends; 0 where there is none."""
    return next((i + 1 for i in range(start, len(parts)) if parts[i].isdigit()), 0)


def _is_made_of(mine: list[int], inner: dict[int, str], rows: Sequence[ForwardCall]) -> bool:
    """Whether a module is a row of numbered ones with several matmuls each."""
    heavy = [i for i in mine if is_heavy(rows[i])]
    held = Counter(inner[i] for i in heavy if inner[i])
    several = [n for n in held.values() if n > 1]
    return len(several) > 1 and sum(several) >= SHARE * len(heavy)


def repeats(rows: Sequence[ForwardCall]) -> list[str]:
    """Rows named by which copy they are in of the longest stretch that repeats."""
    codes: dict[tuple[object, ...], int] = {}
    signs = np.array(
        [codes.setdefault((r.op, r.call.dims, r.call.lists), len(codes)) for r in rows]
    )
    heavy = np.array([is_heavy(r) for r in rows])
    best = (0, 0, 0)  # rows covered, less the period; period; start
    for period in range(1, len(rows) // 2 + 1):
        same = signs[:-period] == signs[period:]
        start, length = _longest(same)
        copies = length // period + 1
        if copies > 1 and heavy[start : start + period].sum() > 1 and length > best[0]:
            best = (length, period, start)
    length, period, start = best
    names = [""] * len(rows)
    if not period or heavy[start : start + length + period].sum() < SOME * heavy.sum():
        return names
    start = _cleanest(rows, start, period, length)
    for copy in range((length + period) // period):
        low = start + copy * period
        if low + period <= len(rows):
            names[low : low + period] = [f"block.{copy}"] * period
    return names


def _narrows(rows: Sequence[ForwardCall]) -> list[str]:
    """Rows named by where a single tensor goes from one to the next, a matmul in each part."""
    thin, names, part, full = crossings(rows) == 1, [], 0, False
    for at, row in enumerate(rows):
        if full and thin[at] and not is_through(row):
            part, full = part + 1, False
        full = full or is_heavy(row)
        names.append(f"part.{part}")
    return names


def _longest(same: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """Start and length of the longest run of true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    at = int(np.argmax(lengths))
    return int(edges[::2][at]), int(lengths[at])


def _cleanest(rows: Sequence[ForwardCall], start: int, period: int, length: int) -> int:
    """The place in a period where the fewest tensors cross from one copy to the next.

    Later places lose a copy where the stretch has no rows left for it, and are not looked at.
    """
    many = crossings(rows)
    options = range(start, start + length % period + 1)
    return min(options, key=lambda at: (many[at], at))


def crossings(rows: Sequence[ForwardCall]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How many tensors that depend on the batch are made before each row and used from there on."""
    last: dict[int, int] = {}
    for at, row in enumerate(rows):
        last |= dict.fromkeys(row.after, at)
    change = np.zeros(len(rows) + 2, np.int64)
    for made, used in last.items():
        if rows[made].learned:
            change[made + 1] += 1
            change[used + 1] -= 1
    return np.cumsum(change)


def crossing(rows: Sequence[ForwardCall], at: int) -> list[int]:
    """Those tensors at one place, by the rows that make them."""
    used = {i for row in rows[at:] for i in row.after}
    return [i for i in sorted(used) if i < at and rows[i].learned]


def _with_ends(
    runs: list[tuple[str, list[int]]], names: Sequence[str]
) -> list[tuple[str, list[int]]]:
    """Rows after the last numbered one form a unit of their own."""
    if not runs or not runs[-1][0]:
        return runs
    last = max(i for i, name in enumerate(names) if name)
    name, mine = runs[-1]
    tail = [i for i in mine if i > last]
    runs[-1] = (name, [i for i in mine if i <= last])
    return [*runs, ("", tail)] if tail else runs


def _joined(
    runs: list[tuple[str, list[int]]], rows: Sequence[ForwardCall]
) -> list[tuple[str, list[int]]]:
    """Units without any product are part of the one before (a pool behind a convolution)."""
    out: list[tuple[str, list[int]]] = []
    for name, mine in runs:
        if out and out[-1][0] and name and not any(is_heavy(rows[i]) for i in mine):
            out[-1][1].extend(mine)
        else:
            out.append((name, list(mine)))
    return out


FEW = 4  # names in a note
_SMALL = 0.1  # of the largest product of a layer: not worth a note


@dataclass
class _LayerBuilder:
    """Layers while they are made, and where each parameter is."""

    layers: list[Layer] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # the layer of each unit
    is_read_later: bool = False  # the unit added last, by another than the next
    homes: dict[str, str] = field(default_factory=dict)  # path → layer/weight
    tied: list[tuple[str, str]] = field(default_factory=list)


def from_graph(graph: Graph, name: str = "") -> Workload:
    """The workload of a captured or traced step."""
    rows = rows_of(graph)
    left = assign(graph, rows)
    mark_live(graph, rows)
    batch = batch_of(graph, rows)
    roles = roles_of(rows, batch)
    model = _model(graph, rows, roles, batch)
    draft = _LayerBuilder()
    for unit in branched(units_of(rows), rows):
        _add(draft, model, unit, left)
    _add_rest(draft, left)
    title = name or str(graph.facts.get("captured", graph.facts.get("source", "step")))
    tied = tuple(dict.fromkeys(draft.tied))
    made = Workload(title, tuple(draft.layers), batch, model.dtype, tied, tokens=model.tokens)
    return replace(made, notes=tuple(_notes(graph, made)))


def _model(graph: Graph, rows: Sequence[ForwardCall], roles: Roles, batch: int) -> Model:
    convs = [
        i for i, r in enumerate(rows) if r.op == "convolution" and math.prod(r.call.dims[0][2:]) > 1
    ]
    images = bool(convs) and not roles.cores
    # networks of images are split by filters and channels, not as Megatron splits words
    known = Roles() if images else roles
    model = Model(graph, rows, known, batch, _dtype(graph, rows), 1, images)
    model.tokens = 1 if images else _tokens(rows, batch)
    model.last_image = max(convs, default=-1)
    return model


def _dtype(graph: Graph, rows: Sequence[ForwardCall]) -> str:
    """The format that most work of matmuls and convolutions is done in."""
    work: dict[str, float] = {}
    for row in rows:
        if is_heavy(row) or row.op.startswith(("bmm", "_flash", "_efficient", "_cudnn")):
            flops = max(float(graph.flops[row.tasks].sum()), row.size)
            work[row.dtype] = work.get(row.dtype, 0.0) + flops
    found = max(work, key=work.__getitem__, default="fp32")
    return found if found in ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8") else "fp32"


def _tokens(rows: Sequence[ForwardCall], batch: int) -> int:
    """Words of a sample: the rows that most linear layers have; 1 where they differ too much."""
    counts = Counter(
        int(row.size / row.out[-1] / batch) for row in rows if is_linear(row) and row.live
    )
    if not counts:
        return 1
    found, many = counts.most_common(1)[0]
    return max(found, 1) if 2 * many > counts.total() else 1


def _add(draft: _LayerBuilder, model: Model, one: Unit, left: list[Weight]) -> None:
    """One unit as a layer; like the one before, it repeats it."""
    unit, mine = one.name, list(one.rows)
    seen: Counter[str] = Counter()
    parts = [(at, pieces_of(model, at, _named(model.rows[at], unit, seen))) for at in mine]
    ops = (*_loose(unit, left), *fused(model, parts))
    if not ops:
        draft.labels.append(draft.labels[-1] if draft.labels else "")
        return
    carries, sizes, splits = _carried(model, mine)
    is_first = not draft.layers
    label = unit or ("input" if is_first else "head")
    after = ("",) if one.is_source else tuple(dict.fromkeys(draft.labels[j] for j in one.after))
    layer = Layer(
        label, tuple(ops), carries, sizes, 1, splits, is_block=one.is_numbered, after=after
    )
    last = draft.layers[-1] if draft.layers else None
    own = {path for at in mine for path, _ in model.rows[at].weights}
    tied = any(path not in own for at in mine for path, _ in model.rows[at].tied)
    alone = tied or bool(after) or draft.is_read_later
    draft.is_read_later = one.is_read_later
    if last and not alone and _is_like(last, layer):
        # the second of a row stands for all: the first may lack a gradient that has no taker
        kept = replace(layer, name=last.name) if last.times == 1 else last
        draft.layers[-1] = replace(kept, times=last.times + 1)
    else:
        draft.layers.append(layer)
    draft.labels.append(draft.layers[-1].name)
    _remember(draft, [model.rows[at] for at in mine], draft.layers[-1], unit)


def _named(row: ForwardCall, unit: str, seen: Counter[str]) -> str:
    """A name of its own within the layer, the same in every copy of it."""
    base = _base(row, unit)
    seen[base] += 1
    return base if seen[base] == 1 else f"{base}.{seen[base]}"


def _base(row: ForwardCall, unit: str) -> str:
    """The module inside the unit, and the call."""
    path = row.path
    if unit and (path == unit or path.startswith(f"{unit}.")):
        path = path[len(unit) :].strip(".")
    return f"{path}.{row.op}" if path else row.op


def _is_like(one: Layer, two: Layer) -> bool:
    """Whether two layers have the same ops of the same sizes, split and kept alike."""
    same = one.sizes == two.sizes and one.splits == two.splits and one.carries == two.carries
    alike = len(one.ops) == len(two.ops) and all(map(_is_same, one.ops, two.ops))
    return same and alike and one.is_block == two.is_block


def _is_same(one: Piece, two: Piece) -> bool:
    if not isinstance(one, Op) or not isinstance(two, Op) or one.kind != "recorded":
        return one == two
    return replace(one, options={}) == replace(two, options={})


def _loose(unit: str, left: list[Weight]) -> list[Op]:
    """Parameters of this unit that no call was found for."""
    mine = [w for w in left if not w.users and unit and w.path.startswith(f"{unit}.")]
    for weight in mine:
        weight.users += 1
    return [_bare(weight, weight.path.removeprefix(f"{unit}.")) for weight in mine]


def _bare(weight: Weight, name: str) -> Op:
    options = {"forward": (), "backward": (), "once": True}
    tensor = Tensor(name, (), times=weight.elements)
    return Op(name, "recorded", {"n": 1.0}, weights=(tensor,), options=options)


def _add_rest(draft: _LayerBuilder, left: list[Weight]) -> None:
    """Parameters outside of any unit are held by the first layer."""
    rest = [w for w in left if not w.users]
    if rest:
        first = draft.layers[0]
        more = tuple(_bare(w, w.path) for w in rest)
        draft.layers[0] = replace(first, ops=(*first.ops, *more))


def _remember(draft: _LayerBuilder, rows: Sequence[ForwardCall], layer: Layer, unit: str) -> None:
    """Where parameters live, and which are another's."""
    names = [w.name for op in layer.works() for w in op.weights]
    for row in rows:
        for path, _ in row.weights:
            draft.homes.setdefault(path, f"{layer.name}/{_home(names, path, row, unit)}")
        for path, _ in row.tied:
            home = _home(names, path, row, unit)
            if home and path in draft.homes:
                draft.tied.append((draft.homes[path], f"{layer.name}/{home}"))


def _home(names: list[str], path: str, row: ForwardCall, unit: str) -> str:
    """The name that a parameter has among those of a layer."""
    start, end = _base(row, unit), f".{path.rpartition('.')[2]}"
    return next((n for n in names if n.startswith(start) and n.endswith(end)), "")


def _carried(model: Model, mine: list[int]) -> tuple[Tensor, dict[str, float], dict[str, str]]:
    """Tensors that the next layer reads."""
    at = mine[-1] + 1
    rows = model.rows
    over = crossing(rows, at) or crossing(rows, mine[0])  # the last sends on nothing
    main = rows[max(over, default=mine[-1])]
    size = sum(rows[i].size for i in over) or main.size
    image = image_of(main)
    if model.images and image and main.out[0] == model.batch:
        sizes = image.dims()
        splits = {} if model.whole else splits_of(image)
        return _over("image", sizes, size, model), sizes, splits
    n = max(model.per_sample(main.size), 1.0)
    if model.tokens > 1 and n % model.tokens == 0:
        sizes = {"tokens": float(model.tokens), "cols": n / model.tokens}
        return _over("hidden", sizes, size, model), sizes, dict(transformer.ROWS)
    return _over("hidden", {"n": n}, size, model), {"n": n}, {}


def _over(name: str, sizes: dict[str, float], size: float, model: Model) -> Tensor:
    times = model.per_sample(size) / math.prod(sizes.values())
    return Tensor(name, ("batch", *sizes), times=times)


def _whole(made: Workload) -> Iterator[str]:
    """Linear layers of blocks that tensor parallelism leaves whole; the first few by name."""
    left = {layer.name: _replicated(layer) for layer in made.layers if layer.is_block}
    some = [(name, ops) for name, ops in left.items() if ops]
    for name, ops in some[:FEW]:
        yield f"{name}: {', '.join(ops[:FEW])} are replicated under tp: no pair to split was found"
    if len(some) > FEW:
        yield f"so are linear layers of {len(some) - FEW} more"


def _replicated(layer: Layer) -> list[str]:
    """Linear layers that are worth splitting, and are not; routers of experts are not worth it."""
    works = [op for op in layer.works() if op.kind in ("matmul", "experts")]
    sizes = {op.name: math.prod(op.dims.values()) for op in works}
    least = _SMALL * max(sizes.values(), default=0.0)
    whole = [op for op in works if not {"tp", "filter"} & set(op.splits)]
    return [op.name for op in whole if op.kind == "matmul" and sizes[op.name] > least]


def _notes(graph: Graph, made: Workload) -> list[str]:
    """Notes on rows that were not recognized."""
    notes = list(_whole(made))
    known = graph.facts.get("parameters")
    if isinstance(known, int | float) and abs(known - made.parameters) > 0.5:
        rest = known - made.parameters
        notes.append(f"{abs(rest):,.0f} parameters {'get no gradient' if rest > 0 else 'too many'}")
    if not is_captured(graph):
        notes.append(
            "a trace tells no modules, tied weights or kept memory: layers are what repeats"
        )
    again = [i for i in graph.select(phase="backward", kind="kernel") if _is_again(graph, int(i))]
    if again:
        notes.append("the step runs some of its forward again: say recompute=full in the plan")
    return notes


def _is_again(graph: Graph, i: int) -> bool:
    """A forward call inside the backward of a captured step."""
    name = graph.text_of("name", i)
    forward = name.rpartition(".")[2].isdigit() and name.startswith(f"{graph.text_of('op', i)}.")
    heavy = graph.text_of("op", i) in (*PRODUCTS, "convolution")
    return is_captured(graph) and forward and heavy
