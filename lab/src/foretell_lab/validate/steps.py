"""Captured steps of many models as one small file, and their price without torch.

A step is the calls it issues, in order. Calls repeat, inside a model and between models, so each
different one is written once, as a line:

    convolution\\tdirection=fwd,kernels=1\\t2\\tin=Bx64x56x56+64x64x1x1+…,strides=L+…\\t1 4 conv - -

what was asked, what its host task says, its phase, its inputs, and then a field a kernel: kind,
format, part, bytes and flop. Sizes that grow with the batch are written as multiples of it (`B`,
`4B`), strides of channels last as `L`; bytes and flop are left out where the inputs say as much.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretell.cluster import Cluster
from foretell.cost import price
from foretell.cost.aten import kernels, read
from foretell.cost.kernel import is_call
from foretell.graph import Graph, Kind, LaneKind, Lanes, Names, Phase, WaitKind, assemble, edges
from foretell.graph.graph import Array, Ids

# Between two queued kernels, and from a launch to its kernel, as a capture has them.
TURNAROUND = LATENCY = 1e-6
_LANES = Lanes(
    *map(np.array, ([0, 0], [0, 0], [LaneKind.HOST, LaneKind.COMPUTE], [True, True]))
)  # fmt: skip
_BYTES = {"torch.float16": 2, "torch.float32": 4, "torch.int64": 8, "torch.bool": 1}
_COLUMNS = ("kind", "op", "shape", "phase", "dtype", "bytes", "flops")


@dataclass(frozen=True)
class Step:
    """One model's step."""

    batch: int
    parameters: int
    calls: Ids  # numbers of lines, in the order they were issued


@dataclass(frozen=True)
class Steps:
    """Steps of many models; `missing` says why one is not here."""

    lines: tuple[str, ...]
    models: Mapping[str, Step]
    missing: Mapping[str, str]


def load(path: Path) -> Steps:
    """The steps in a file."""
    raw = lzma.decompress(path.read_bytes())
    head, _, rest = raw.partition(b"\n")
    about = json.loads(head)
    lines = tuple(rest[: about["text"]].decode().split("\n"))
    calls = np.frombuffer(rest[about["text"] :], "<u4").astype(np.int64)
    models, at = {}, 0
    for name, (batch, parameters, many) in about["models"].items():
        models[name] = Step(batch, parameters, calls[at : at + many])
        at += many
    return Steps(lines, models, about["missing"])


def save(steps: Steps, path: Path) -> None:
    """Write steps to a file."""
    text = "\n".join(steps.lines).encode()
    models = {name: [s.batch, s.parameters, len(s.calls)] for name, s in steps.models.items()}
    about = {"text": len(text), "models": models, "missing": dict(steps.missing)}
    numbers = np.concatenate([s.calls for s in steps.models.values()]).astype("<u4")
    raw = json.dumps(about).encode() + b"\n" + text + numbers.tobytes()
    path.write_bytes(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))


def taken(graph: Graph, batch: int, lines: dict[str, int]) -> Step:
    """A captured step as numbers of lines; new lines are added to those there are."""
    ops, shapes = graph.texts("op"), graph.texts("shape")
    starts = np.flatnonzero(graph.kind == Kind.HOST).tolist()
    known: dict[tuple[tuple[float, ...], ...], int] = {}
    columns = np.stack([graph.column(name) for name in _COLUMNS], axis=1).tolist()
    calls = []
    for first, last in zip(starts, [*starts[1:], graph.size], strict=True):
        key = tuple(tuple(columns[i]) for i in range(first, last))
        if key not in known:
            line = _line(graph, range(first, last), ops, shapes, batch)
            known[key] = lines.setdefault(line, len(lines))
        calls.append(known[key])
    return Step(batch, int(graph.facts["parameters"]), np.array(calls, np.int64))


def _line(graph: Graph, tasks: range, ops: list[str], shapes: list[str], batch: int) -> str:
    """One call and its kernels, which are asked for the same."""
    host, *parts = tasks
    shape_text = shapes[parts[0]].partition(",part=")[0] if parts else ""
    short = shape_text if graph.phase[host] == Phase.UPDATE else _shorter(shape_text, batch)
    fields = [_field(graph, i, ops[i], shapes[i], batch) for i in parts]
    return "\t".join((ops[host], shapes[host], str(int(graph.phase[host])), short, *fields))


def _field(graph: Graph, i: int, op: str, shape: str, batch: int) -> str:
    moved, flops = float(graph.bytes[i]), float(graph.flops[i])
    said = f"{int(graph.kind[i])} {int(graph.dtype[i])} {shape.partition(',part=')[2] or '-'}"
    if is_call(shape) and _kernel_calls(op, shape, moved, flops) == _kernel_calls(
        op, shape, _cast(op, shape)
    ):
        return said
    return f"{said} {_multiple(int(moved), batch)} {_multiple(int(flops), batch)}"


def _kernel_calls(
    op: str, shape: str, moved: float, flops: float = 0.0
) -> list[tuple[object, ...]]:
    """What a price depends on: flop only where nothing else is known."""
    found = kernels(op, shape, moved, flops)
    return [(k.op, k.shape, k.bytes, k.times, k.flops * (k.op == "bare")) for k in found]


def _cast(op: str, shape: str) -> float:
    """Bytes of a copy that names the format it writes; 0 for all else."""
    if op != "copy_":
        return 0.0
    call = read(op, shape)
    written = next((_BYTES[v] for v in call.values if v in _BYTES), 0)
    return float(call.size(0) * (call.item() + (written or call.item())))


def _multiple(number: int, batch: int) -> str:
    if number % batch:
        return str(number)
    return "B" if number == batch else f"{number // batch}B"


def _number(text: str, batch: int) -> int:
    return int(text[:-1] or 1) * batch if text.endswith("B") else int(text)


def _shorter(shape_text: str, batch: int) -> str:
    """A call with the first side of each tensor by the batch, and channels last as one letter."""
    if not is_call(shape_text):
        return shape_text
    parts = dict(item.partition("=")[::2] for item in shape_text.split(","))
    dims = parts["in"].split("+")
    if "strides" in parts:
        pairs = zip(dims, parts["strides"].split("+"), strict=True)
        parts["strides"] = "+".join("L" if s == _last(d) else s for d, s in pairs)
    parts["in"] = "+".join("|".join(_led(d, batch) for d in some.split("|")) for some in dims)
    return ",".join(f"{key}={value}" for key, value in parts.items())


def _led(dims: str, batch: int) -> str:
    """`512x64` of a batch of 256 → `2Bx64`."""
    first, x, others = dims.partition("x")
    return f"{_multiple(int(first), batch)}{x}{others}" if first.isdigit() else dims


def _last(dims: str) -> str:
    """Strides of an image with channels last."""
    sides = dims.split("x")
    if len(sides) != 4:
        return "none"
    _, c, h, w = map(int, sides)
    return f"{c * h * w}x1x{w * c}x{c}"


def _whole(short: str, batch: int) -> str:
    """The call that was shortened."""
    if not is_call(short):
        return short
    parts = dict(item.partition("=")[::2] for item in short.split(","))
    somes = (some.split("|") for some in parts["in"].split("+"))
    dims = ["|".join(_grown(d, batch) for d in some) for some in somes]
    if "strides" in parts:
        pairs = zip(dims, parts["strides"].split("+"), strict=True)
        parts["strides"] = "+".join(_last(d) if s == "L" else s for d, s in pairs)
    parts["in"] = "+".join(dims)
    return ",".join(f"{key}={value}" for key, value in parts.items())


def _grown(dims: str, batch: int) -> str:
    first, x, others = dims.partition("x")
    return f"{_number(first, batch)}{x}{others}" if first.endswith("B") else dims


Task = tuple[int, str, str, int, int, float, float]  # as in `_COLUMNS`


def tasks_of(line: str, batch: int) -> list[Task]:
    """The host task of a call and its kernels."""
    op, said, phase, short, *fields = line.split("\t")
    shape_text = _whole(short, batch)
    found: list[Task] = [(int(Kind.HOST), op, said, int(phase), 0, 0.0, 0.0)]
    for field in fields:
        kind, dtype, part, *counted = field.split(" ")
        shape = shape_text if part == "-" else f"{shape_text},part={part}"
        moved, flops = (float(_number(n, batch)) for n in counted or ("0", "0"))
        moved = moved or _cast(op, shape)
        found.append((int(kind), op, shape, int(phase), int(dtype), moved, flops))
    return found


def priced(steps: Steps, cluster: Cluster) -> Iterator[tuple[str, Graph]]:
    """Every model's step on a cluster; each different call is priced once for all of them."""
    calls, first, size = _different(steps)
    calls = price(calls, cluster)
    for name, step in steps.models.items():
        keys = step.calls + len(steps.lines) * step.batch
        at = np.searchsorted(first[0], keys)
        yield name, _in_order(calls, first[1][at], size[at])


def _different(steps: Steps) -> tuple[Graph, tuple[Ids, Ids], Ids]:
    """A graph of every call of every batch, and by call where its tasks begin and how many."""
    many = len(steps.lines)
    keys = np.unique(np.concatenate([s.calls + many * s.batch for s in steps.models.values()]))
    texts: dict[str, int] = {"": 0}
    rows: list[tuple[float, ...]] = []
    sizes = []
    for key in keys.tolist():
        batch, line = divmod(key, many)
        found = tasks_of(steps.lines[line], batch)
        rows += [_numbered(task, texts) for task in found]
        sizes.append(len(found))
    columns = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))
    none = edges(len(rows), [], [], [], [])
    graph = assemble(len(rows), columns, none, names=Names(texts), check=False)
    size = np.array(sizes, np.int64)
    return graph, (keys, np.cumsum(size) - size), size


def _numbered(task: Task, texts: dict[str, int]) -> tuple[float, ...]:
    op, shape = (texts.setdefault(text, len(texts)) for text in task[1:3])
    return (task[0], op, shape, *task[3:])


def _in_order(calls: Graph, first: Ids, size: Ids) -> Graph:
    """The tasks of one step: a host that issues, and a stream that runs."""
    ends = np.cumsum(size)
    total = int(ends[-1])
    task = np.repeat(first - (ends - size), size) + np.arange(total)
    is_host = calls.kind[task] == Kind.HOST
    host = np.repeat(ends - size, size)
    waits = np.flatnonzero(~is_host)
    columns: dict[str, Array] = {name: calls.column(name)[task] for name in (*_COLUMNS, "seconds")}
    columns |= {"lane": np.where(is_host, 0, 1), "gap": np.where(is_host, 0.0, TURNAROUND)}
    lag, kind = np.full(len(waits), LATENCY), np.full(len(waits), WaitKind.LAUNCH)
    waiting = edges(total, waits, host[waits], lag, kind)
    return assemble(total, columns, waiting, names=calls.names, lanes=_LANES, check=False)
