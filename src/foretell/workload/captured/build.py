"""From a recorded step to a workload: rows, roles, units, layers, and what was not understood."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from foretell.graph import Graph
from foretell.workload.captured import units
from foretell.workload.captured.fuse import fused
from foretell.workload.captured.model import Model, Piece, image_of
from foretell.workload.captured.ops import pieces_of
from foretell.workload.captured.roles import Roles, is_linear, roles_of
from foretell.workload.captured.rows import PRODUCTS, Row, batch_of, is_captured, mark_live, rows_of
from foretell.workload.captured.units import Unit, branched
from foretell.workload.captured.weights import Weight, assign, exact
from foretell.workload.models import transformer
from foretell.workload.models.windows import splits_of
from foretell.workload.workload import Layer, Op, Tensor, Workload

FEW = 4  # names in a note
LITTLE = 0.1  # of the largest product of a layer: not worth a note


@dataclass
class _Draft:
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
    draft = _Draft()
    for unit in branched(units.units_of(rows), rows):
        _add(draft, model, unit, left)
    _add_rest(draft, rows, left)
    title = name or str(graph.facts.get("captured", graph.facts.get("source", "step")))
    made = Workload(
        title,
        tuple(draft.layers),
        batch,
        model.dtype,
        tuple(dict.fromkeys(draft.tied)),
        tokens=model.tokens,
    )
    return replace(made, notes=tuple(_notes(graph, made)))


def _model(graph: Graph, rows: Sequence[Row], roles: Roles, batch: int) -> Model:
    convs = [
        i for i, r in enumerate(rows) if r.op == "convolution" and math.prod(r.call.dims[0][2:]) > 1
    ]
    images = bool(convs) and not roles.cores
    model = Model(graph, rows, _without_words(roles, images), batch, _dtype(graph, rows), 1, images)
    model.tokens = 1 if images else _tokens(rows, batch)
    model.last_image = max(convs, default=-1)
    return model


def _without_words(roles: Roles, images: bool) -> Roles:
    """Networks of images are split by filters and channels, not as Megatron splits words."""
    return Roles() if images else roles


def _dtype(graph: Graph, rows: Sequence[Row]) -> str:
    """The format that most work of matmuls and convolutions is done in."""
    work: dict[str, float] = {}
    for row in rows:
        if units.is_heavy(row) or row.op.startswith(("bmm", "_flash", "_efficient", "_cudnn")):
            flops = max(float(graph.flops[row.tasks].sum()), row.size)
            work[row.dtype] = work.get(row.dtype, 0.0) + flops
    found = max(work, key=work.__getitem__, default="fp32")
    return found if found in ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8") else "fp32"


def _tokens(rows: Sequence[Row], batch: int) -> int:
    """Words of a sample: the rows that most linear layers have; 1 where they differ too much."""
    counts = Counter(
        int(row.size / row.out[-1] / batch) for row in rows if is_linear(row) and row.live
    )
    if not counts:
        return 1
    found, many = counts.most_common(1)[0]
    return max(found, 1) if 2 * many > counts.total() else 1


def _add(draft: _Draft, model: Model, one: Unit, left: list[Weight]) -> None:
    """One unit as a layer; like the one before, it repeats it."""
    unit, mine = one.name, list(one.rows)
    seen: Counter[str] = Counter()
    parts = [(at, pieces_of(model, at, _named(model.rows[at], unit, seen))) for at in mine]
    ops = (*_loose(model, unit, left), *fused(model, parts))
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


def _named(row: Row, unit: str, seen: Counter[str]) -> str:
    """A name of its own within the layer, the same in every copy of it."""
    base = _base(row, unit)
    seen[base] += 1
    return base if seen[base] == 1 else f"{base}.{seen[base]}"


def _base(row: Row, unit: str) -> str:
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


def _loose(model: Model, unit: str, left: list[Weight]) -> list[Op]:
    """Parameters of this unit that no call was found for."""
    mine = [w for w in left if not w.users and unit and w.path.startswith(f"{unit}.")]
    found = []
    for weight in mine:
        weight.users += 1
        found.append(_bare(weight, model.rows, weight.path.removeprefix(f"{unit}.")))
    return found


def _bare(weight: Weight, rows: Sequence[Row], name: str) -> Op:
    options = {"forward": (), "backward": (), "once": True}
    tensor = Tensor(name, (), times=exact(weight, rows))
    return Op(name, "recorded", {"n": 1.0}, weights=(tensor,), options=options)


def _add_rest(draft: _Draft, rows: Sequence[Row], left: list[Weight]) -> None:
    """Parameters outside of any unit are held by the first layer."""
    rest = [w for w in left if not w.users]
    if rest:
        first = draft.layers[0]
        more = tuple(_bare(w, rows, w.path) for w in rest)
        draft.layers[0] = replace(first, ops=(*first.ops, *more))


def _remember(draft: _Draft, rows: Sequence[Row], layer: Layer, unit: str) -> None:
    """Where parameters live, and which are another's."""
    names = [w.name for op in layer.works() for w in op.weights]
    for row in rows:
        for path, _ in row.weights:
            draft.homes.setdefault(path, f"{layer.name}/{_home(names, path, row, unit)}")
        for path, _ in row.tied:
            home = _home(names, path, row, unit)
            if home and path in draft.homes:
                draft.tied.append((draft.homes[path], f"{layer.name}/{home}"))


def _home(names: list[str], path: str, row: Row, unit: str) -> str:
    """The name that a parameter has among those of a layer."""
    start, end = _base(row, unit), f".{path.rpartition('.')[2]}"
    return next((n for n in names if n.startswith(start) and n.endswith(end)), "")


def _carried(model: Model, mine: list[int]) -> tuple[Tensor, dict[str, float], dict[str, str]]:
    """Tensors that the next layer reads."""
    at = mine[-1] + 1
    rows = model.rows
    over = units.crossing(rows, at) or units.crossing(rows, mine[0])  # the last sends on nothing
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
    least = LITTLE * max(sizes.values(), default=0.0)
    return [
        op.name
        for op in works
        if op.kind == "matmul" and not _is_split(op) and sizes[op.name] > least
    ]


def _is_split(op: Op) -> bool:
    return "tp" in op.splits or "filter" in op.splits


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
