"""How long tasks take on a cluster: the chain of price models, and its links.

How long tasks take on a cluster: price models are tried in order, each answers or passes.

A model answers seconds and a relative standard error for every piece of work it knows, and NaN for
what it does not. The first answer counts, and where it came from is kept with the task.

    measured    a table that was measured on this kind of device
    learned     a regressor, inside the region it was trained on
    formula     roofline with efficiency curves; α–β by algorithm and topology for collectives

Pieces of work to be priced: each different one once, however many tasks do it. A graph of a hundred
thousand tasks holds a few hundred different pieces of work; prices are asked for those and passed
back to all tasks.

What the host spends to issue operators: Python, dispatch, autograd and the launch.

A host task whose shape says what it issues can be priced on any device's host:

    direction   fwd or bwd           kernels   launched by the operator; 0 for a view
    modules     nn.Modules entered   nodes     autograd nodes entered
    tensors     of a list operator   update    1 in the optimizer, where gradients are off

    seconds = step · (modules·module + nodes·node + own cost of the operator + tensors·each)

Constants and their sources stand in `host.toml`. A host is as fast as its launches: another
device's numbers are scaled by its `launch`. Two machines of one kind differ by 20 to 25 %.

A workload's description counts kernels, not calls: `issued` is what one of them costs with its
share of modules, views and autograd nodes, `updated` what an optimizer's step does.

Prices that were measured: tables of a user's, those that come along, ops timed on this
machine.

Tables are CSV, plain or gzip, with the columns `device,op,dtype,shape,seconds` and optionally
`spread` (relative standard deviation). A row counts only for its own kind of device and exactly its
own shape; several rows of the same work are one price, their median.

Measured tables that come with the package, as a link of the price chain.
`tables/measured/DEVICE.csv.gz` is what `python -m foretell_lab.bench` wrote on such a device. Of
its many ops the matmuls are read here: the three of a linear layer y = x·Wᵀ, with x of m × k and W
of n × k, and batches of them.

    forward  y: m × n over k        dgrad  dx: m × k over n        wgrad  dW: n × k over m

Ops timed on the machine at hand: their seconds by shape, and those of others of their family. A
shape that was timed costs what it took; another of the same op is interpolated by its work (flop,
else bytes, else numbers). What is asked for and not there is kept in `asked`, so that it can be
timed.

A correction to the formula for kernels on devices that were measured densely.

Boosted trees predict ln(measured/formula) from the shape, how it falls on tiles and units, and what
the formula answers. They are trained by `benchmarks/fit_kernels.py` and answer in plain numpy from
`tables/kernel_learned.npz`. They pass (nan) on a device, op or format they were not trained on, and
on shapes outside the box of shapes they saw there, so that the formula answers instead.

The formulas as links of the price chain: operators as their kernels, copies and collectives.

Each takes the pieces of work it understands, asks the formula once for all of one device or one
group of ranks, and passes on the rest. `Operators` lets a model that knows kernels answer for
PyTorch's operators: the price of one is the sum of its kernels' (→ `foretell.cost.aten`), and is
known where all of them are. Work that is no operator goes to the model as it is.
"""

from __future__ import annotations

import csv
import gzip
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster import Cluster
from foretell.cluster.node import Device
from foretell.compiled import H2, compiled
from foretell.cost import collective, kernel
from foretell.cost import kernel as shapes
from foretell.cost.aten import Kernel, kernels
from foretell.cost.kernel import Price, Shapes, is_call
from foretell.cost.kernel import shape_columns as columns
from foretell.errors import InputError, UnmodelledError
from foretell.graph.graph import (
    COLLECTIVES,
    Array,
    Dtype,
    Graph,
    Ids,
    Kind,
    Source,
    ranks_of,
    word_of,
)
from foretell.io import read_text

_TEXT = ("op", "shape", "group")
_NUMBERS = ("kind", "dtype", "flops", "bytes", "comm_bytes")


PRICED = (Kind.KERNEL, Kind.COPY, Kind.COLLECTIVE, Kind.SEND)


@dataclass(frozen=True, eq=False)
class Work:
    """Different pieces of work, one row each."""

    cluster: Cluster
    kind: Array
    op: tuple[str, ...]
    shape: tuple[str, ...]
    group: tuple[str, ...]  # the ranks of a collective
    dtype: tuple[str, ...]
    flops: Array
    bytes: Array
    comm_bytes: Array
    rank: Array  # a rank that does it; others on the same kind of device cost the same

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, rows: Array) -> Work:
        """Some of the rows."""
        chosen = rows.tolist()
        texts: dict[str, Any] = {
            name: tuple(getattr(self, name)[r] for r in chosen)
            for name in ("op", "shape", "group", "dtype")
        }
        numbers = {n: getattr(self, n)[rows] for n in ("kind", "flops", "bytes", "comm_bytes")}
        return Work(cluster=self.cluster, rank=self.rank[rows], **texts, **numbers)


def work_of(graph: Graph, tasks: Ids, cluster: Cluster) -> tuple[Work, Array]:
    """The different pieces of work among some tasks, and for each task which one it is."""
    ranks = graph.rank[tasks]
    if len(tasks) and ranks.max() >= cluster.size:
        raise InputError(
            f"the graph has rank {ranks.max()}, the cluster only {cluster.size} ranks",
            hint="name a larger cluster, such as one with `nodes=` or `gpus=` raised",
        )
    columns = [graph.column(name)[tasks] for name in (*_NUMBERS, *_TEXT)]
    place = _place_of_rank(graph, tasks, cluster)
    first, number = _different([*columns, place])
    row = tasks[first]
    names = graph.names
    texts = {name: tuple(names[k] for k in graph.column(name)[row]) for name in _TEXT}
    return Work(
        cluster=cluster,
        kind=graph.kind[row],
        dtype=tuple(word_of(Dtype, d) for d in graph.dtype[row]),
        flops=graph.flops[row],
        bytes=graph.bytes[row],
        comm_bytes=graph.comm_bytes[row],
        rank=graph.rank[row],
        **texts,
    ), number


def _place_of_rank(graph: Graph, tasks: Ids, cluster: Cluster) -> Array:
    """The kind of device a task runs on, as a number."""
    numbers: dict[str, int] = {}
    kinds = [numbers.setdefault(d.name, len(numbers)) for d in cluster.devices]
    found: Array = np.array(kinds)[graph.rank[tasks]]
    return found


def _different(columns: list[Array]) -> tuple[Array, Array]:
    """Rows that differ: the first of each, and for every row which one it is like."""
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, code = np.unique(column, return_inverse=True)
        if len(values) > 1:
            # Pair by pair, so that the codes never grow beyond the number of rows.
            _, number = np.unique(number * len(values) + code.reshape(-1), return_inverse=True)
            number = number.reshape(-1)
    _, first, number = np.unique(number, return_index=True, return_inverse=True)
    return first, number.reshape(-1)


class Model(Protocol):
    """Something that knows what work costs."""

    name: str
    source: Source

    def price(self, work: Work) -> tuple[Array, Array]:
        """Seconds and relative standard error of each piece of work; NaN where it passes."""


def price(
    graph: Graph, cluster: Cluster, models: Sequence[Model] | None = None, *, again: bool = False
) -> Graph:
    """The graph with every device task priced on a cluster, and host tasks that have a shape.

    Tasks that were priced or measured before keep what they have, unless `again` is set.
    """
    mine = np.isin(graph.kind, PRICED) | ((graph.kind == Kind.HOST) & (graph.shape != 0))
    if not again:
        mine &= graph.source == Source.NONE
        mine &= graph.seconds == 0
    tasks = np.flatnonzero(mine)
    if not len(tasks):
        return graph
    with graph.edit(f"price:on={cluster.name}") as edit:
        seconds, sigma, source = prices(graph, tasks, cluster, models)
        edit.set(tasks, seconds=seconds, sigma=sigma, source=source)
    return edit.graph


def priced(graph: Graph, cluster: Cluster | None, name: str) -> Graph:
    """A graph priced on a cluster, where one is named; one in which nothing has a time needs it."""
    if cluster is not None:
        return price(graph, cluster)
    return timed(graph, name, "name the cluster to price it on: --on h100")


def timed(graph: Graph, name: str, hint: str) -> Graph:
    """The graph unchanged; refused where no kernel (without kernels: no task) takes time."""
    kernels = graph.kind == Kind.KERNEL
    work = graph.seconds[kernels] if kernels.any() else graph.seconds
    if len(work) and not work.any():
        raise InputError(f"the tasks of `{name}` have no times", hint=hint)
    return graph


def prices(
    graph: Graph, tasks: Ids, cluster: Cluster, models: Sequence[Model] | None = None
) -> tuple[Array, Array, Array]:
    """Seconds, relative standard error and source of some tasks on a cluster."""
    work, number = work_of(graph, tasks, cluster)
    seconds = np.full(len(work), np.nan)
    sigma, source = np.zeros(len(work)), np.zeros(len(work), np.uint8)
    chain = default_models() if models is None else models
    for model in chain:
        left = np.flatnonzero(np.isnan(seconds))
        if not len(left):
            break
        found, spread = model.price(work.take(left))
        known = left[~np.isnan(found)]
        seconds[left], sigma[left] = found, spread
        source[known] = model.source
    _check_all(work, seconds, chain)
    seconds *= _calibrated(work, cluster)
    return seconds[number], sigma[number], source[number]


def _calibrated(work: Work, cluster: Cluster) -> Array:
    """How many times as long as priced work takes on this cluster; messages know it themselves."""
    known = cluster.calibration
    on_device = np.isin(work.kind, (Kind.KERNEL, Kind.COPY))
    found: Array = np.where(on_device, known.compute, 1.0)
    found[work.kind == Kind.HOST] = known.host
    return found


def default_models() -> tuple[Model, ...]:
    """The default chain of price models."""

    measured = Operators(ShippedTables(), plain=True)
    kernels = (measured, Operators(LearnedKernel()), Operators(KernelFormula()))
    return (*kernels, CopyFormula(), CollectiveFormula(), HostCalls())


def _check_all(work: Work, seconds: Array, chain: Sequence[Model]) -> None:
    left = np.flatnonzero(np.isnan(seconds))
    if not len(left):
        return
    r = int(left[0])
    kind = word_of(Kind, work.kind[r])
    tried = ", ".join(model.name for model in chain)
    raise UnmodelledError(
        f"no price for {kind} `{work.op[r]}` ({work.shape[r] or 'no shape'}); tried: {tried}",
        hint="give it flops and bytes (or a shape), or its seconds",
    )


# Classes of kernels that cost the host what another does.
_ALIKE = {"conv_wgrad": "conv", "conv_dgrad": "conv", "rms_norm": "norm"}


@cache
def constants() -> dict[str, Any]:
    """The tables of `host.toml`."""
    text = files("foretell.cost").joinpath("host.toml").read_text("utf-8")
    return tomllib.loads(text)


class HostCalls:
    """Prices host tasks that say what they issue; passes all others."""

    name = "host calls"
    source = Source.FORMULA

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = np.full(len(work), np.nan), np.zeros(len(work))
        chain = constants()["chain"]
        for r in np.flatnonzero(work.kind == Kind.HOST).tolist():
            if work.shape[r]:
                launch = work.cluster.devices[int(work.rank[r])].launch
                seconds[r] = _issuing(work, r) * launch / chain["launch"]
                sigma[r] = chain["spread"]
        return seconds, sigma


def _issuing(work: Work, r: int) -> float:
    """What a task that issues something takes, or an operator on tensors of the host."""
    if is_call(work.shape[r]):
        chain = constants()["chain"]
        return float(chain["step"] * chain["on_host"])
    return host_seconds(work.op[r], dict(shapes.parse_shape(work.shape[r])))


def host_seconds(op: str, sizes: dict[str, float]) -> float:
    """What issuing an operator takes on the host the constants are from."""
    own, chain = _own(op, sizes), constants()["chain"]
    if sizes.get("update"):  # read off whole optimizer steps
        return own
    entered = sizes.get("modules", 0.0) * chain["module"] + sizes.get("nodes", 0.0) * chain["node"]
    return float(chain["step"] * (entered + own))


def _own(op: str, sizes: dict[str, float]) -> float:
    way, chain, own = int(sizes.get("direction", 0.0) > 0), constants()["chain"], constants()["own"]
    tensors, launched = sizes.get("tensors", 0.0), sizes.get("kernels", 0.0)
    if tensors:
        each = chain["fused" if op.startswith("_fused") else "list"]
        return float(chain["kernel"][0] + tensors * each)
    if not launched:
        return float(chain["on_host"] if sizes.get("update") else chain["view"][way])
    further = chain["further"] * (launched - 1)
    if op in own:
        return float(own[op][way] + further)
    return float(chain["update"] if sizes.get("update") else chain["kernel"][way] + further)


def issued(op: str, is_backward: bool) -> float:
    """Seconds to issue one kernel of a class, with all that PyTorch does around it."""
    return float(constants()["kinds"][call_kind(op)][is_backward])


def call_kind(op: str) -> str:
    """The kind of kernel under which a class is counted."""
    plain = op.removesuffix("_backward")
    plain = _ALIKE.get(plain, plain)
    return plain if plain in constants()["kinds"] else "other"


def updated(optimizer: str, how: str, tensors: Array, scaled: bool) -> Array:
    """Seconds of an optimizer's step over so many tensors; `scaled` behind a gradient scaler."""
    table = constants()["update"]
    start, each = table[f"{optimizer}-{how}"]
    found: Array = start + (table["scaler"][0] if scaled else 0.0) + each * tensors
    return found


Key = tuple[str, str, str, str]  # device, op, dtype, shape
COLUMNS = ("device", "op", "dtype", "shape", "seconds")
_UNSAID = {"", "b=1", "ta=0", "tb=0", "groups=1", "stride=1", "pad=0"}
SPREAD = 0.03  # of a median of repeated measurements, by default


# The sizes (m, n, k) of the matmul that each part of a linear layer is.
_SIDES = {"forward": ("m", "n", "k"), "dgrad": ("m", "k", "n"), "wgrad": ("n", "k", "m")}
SIGMA = 0.1  # of ln(seconds in a step / seconds alone)
_PRODUCTS = ("gemm", "conv", "conv_dgrad", "conv_wgrad", "attention")
_DEFAULTS = {"b": 1.0, "ta": 0.0, "tb": 0.0, "groups": 1.0, "stride": 1.0, "pad": 0.0}


@dataclass(frozen=True, eq=False)
class Measured:
    """A price model that knows what was measured and nothing else."""

    table: Mapping[Key, tuple[float, float]]
    name: str = "measured table"
    source: Source = Source.MEASURED

    def price(self, work: Work) -> tuple[Array, Array]:
        devices = [work.cluster.devices[int(rank)].name for rank in work.rank]
        keys = zip(devices, work.op, work.dtype, map(normal, work.shape), strict=True)
        found = [self.table.get(key, (np.nan, 0.0)) for key in keys]
        seconds, sigma = np.array(found, np.float64).reshape(-1, 2).T
        return seconds, sigma


def normal(shape: str) -> str:
    """A shape with its keys in order and without what goes without saying."""
    parts = {part.strip() for part in shape.split(",")}
    return ",".join(sorted(parts - _UNSAID))


def load(path: str | Path) -> Measured:
    """The table in a file."""
    try:
        return collected(_rows(csv.DictReader(read_text(path).splitlines()), str(path)))
    except csv.Error as error:
        raise InputError(f"`{path}` is no table: {error}") from None


def collected(rows: Iterable[tuple[Key, float, float]]) -> Measured:
    """A table of rows; of several for the same work, their median."""
    seen: dict[Key, list[tuple[float, float]]] = {}
    for key, seconds, spread in rows:
        seen.setdefault(key, []).append((seconds, spread))
    return Measured(
        {
            key: (median(s for s, _ in found), max(spread for _, spread in found))
            for key, found in seen.items()
        }
    )


def _rows(reader: csv.DictReader[str], where: str) -> Iterator[tuple[Key, float, float]]:
    missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
    if missing:
        raise InputError(
            f"`{where}` has no column {', '.join(f'`{m}`' for m in missing)}",
            hint=f"a measured table has {', '.join(COLUMNS)}",
        )
    for number, row in enumerate(reader, start=2):
        try:
            seconds, spread = float(row["seconds"]), float(row.get("spread") or SPREAD)
        except (TypeError, ValueError):
            seconds, spread = np.nan, np.nan
        if not (0 < seconds < np.inf and 0 <= spread < np.inf):
            raise InputError(f"`{where}`, line {number}: `{row['seconds']}` is no time in seconds")
        yield (row["device"], row["op"], row["dtype"], normal(row["shape"])), seconds, spread


class ShippedTables:
    """What was measured on devices whose tables come with the package."""

    name = "shipped table"
    source = Source.MEASURED

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = np.full(len(work), np.nan), np.zeros(len(work))
        devices = np.array([work.cluster.devices[int(rank)].name for rank in work.rank])
        for name in sorted(set(devices.tolist()) & names()):
            rows = np.flatnonzero(devices == name)
            seconds[rows], sigma[rows] = table(name).price(work.take(rows))
        return seconds, sigma


@cache
def names() -> frozenset[str]:
    """The devices that have a table."""
    ending = ".csv.gz"
    found = (f.name for f in files("foretell.cost").joinpath("tables", "measured").iterdir())
    return frozenset(name.removesuffix(ending) for name in found if name.endswith(ending))


@cache
def table(device: str) -> Measured:
    """The table of one device."""
    path = files("foretell.cost").joinpath("tables", "measured", f"{device}.csv.gz")
    text = gzip.decompress(path.read_bytes()).decode()
    return collected(_shipped_rows(device, csv.DictReader(text.splitlines())))


def _shipped_rows(device: str, reader: csv.DictReader[str]) -> Iterator[tuple[Key, float, float]]:
    for row in reader:
        shape = _product(row)
        if shape and row["device_seconds"]:  # some rows time the host alone
            key = (device, "gemm", row["dtype"], normal(shape))
            yield key, float(row["device_seconds"]), float(row["spread"] or 0.0)


def _product(row: dict[str, str]) -> str:
    """The shape of the matmul a row is about; empty where it is not about one."""
    sizes = dict(part.split("=") for part in row["shape"].split(";")) if row["shape"] else {}
    if row["op"] == "linear" and row["direction"] in _SIDES:
        m, n, k = (sizes[name] for name in _SIDES[row["direction"]])
        return f"m={m},n={n},k={k}"
    if row["op"] == "bmm" and row["direction"] == "forward":
        return ",".join(f"{key}={sizes[key]}" for key in ("b", "m", "n", "k"))
    return ""


class TimedOp(NamedTuple):
    """One op, number format and shape."""

    op: str
    dtype: str
    shape: tuple[tuple[str, float], ...]  # sorted; `bytes` among them where they are counted

    @property
    def work(self) -> float:
        """What its seconds grow with."""
        size = dict(self.shape)
        if self.op == "gemm":
            return size.get("b", 1.0) * size["m"] * size["n"] * size["k"]
        if self.op == "attention":
            pairs = size["sq"] * size["sk"] * size["d"]
            return size.get("b", 1.0) * size.get("heads", 1.0) * pairs
        if self.op in _PRODUCTS:
            side = size["h"] * size["w"] * size["r"] * size["s"] / size.get("stride", 1.0) ** 2
            return size["n"] * size["c"] * size["k"] / size.get("groups", 1.0) * side
        whole = size.get("n") or size.get("rows", 1.0) * size.get("cols", 1.0)
        return size.get("bytes") or whole


@dataclass
class TimedOps:
    """Seconds of ops; `load` times as long as on an idle machine."""

    sigma: ClassVar[float] = SIGMA
    seconds: Mapping[TimedOp, float] = field(default_factory=dict)
    load: float = 1.0
    queried: dict[TimedOp, None] = field(default_factory=dict)  # an ordered set

    def price(self, op: str, dtype: str, shape: Mapping[str, Array], moved: Array) -> Array:
        """Seconds of each row; NaN where no op of the kind was timed."""
        rows = [named(op, dtype, shape, moved, i) for i in range(len(moved))]
        found = []
        for row in rows:
            if row not in self.seconds:
                self.queried[row] = None
            found.append(self.seconds.get(row) or self._like(row))
        return self.load * np.array(found, float)

    def _like(self, row: TimedOp) -> float:
        """Interpolated between ops of the same kind with less and more work."""
        kin = [(k.work, s) for k, s in self.seconds.items() if k[:2] == row[:2] and k.work > 0]
        if not kin:
            return float("nan")
        work, took = (np.log(np.array(v)) for v in zip(*sorted(kin), strict=True))
        at = np.log(max(row.work, 1e-9))
        if at > work[-1]:
            return float(np.exp(took[-1] + at - work[-1]))  # large ops: seconds grow as work does
        return float(np.exp(np.interp(at, work, took)))


def named(
    op: str, dtype: str, shape: Mapping[str, Array], moved: Array, row: int
) -> TimedOp:  # fmt: skip
    """One row of a question as a key."""
    sizes = {k: float(v[row]) for k, v in shape.items() if not np.isnan(v[row])}
    if not np.isnan(moved[row]) and op not in _PRODUCTS:
        sizes["bytes"] = float(moved[row])
    kept = {k: round(v, 3) for k, v in sizes.items() if _DEFAULTS.get(k) != v}
    return TimedOp(op, dtype, tuple(sorted(kept.items())))


Floats = npt.NDArray[np.float32]


Reals = npt.NDArray[np.float64]
# The sizes of a shape; a box of their logarithms bounds what a device was measured on.
SIZES = {"gemm": ("b", "m", "n", "k"), "conv": ("n", "c", "h", "w", "k", "r", "s", "stride", "pad")}
_FLAGS = {
    "gemm": ("ta", "tb"),
    "conv": ("groups",),
    "conv_dgrad": ("groups",),
    "conv_wgrad": ("groups",),
}
_ONE = {"b", "groups", "stride"}  # what a shape may leave out, being 1
_TILES = (32.0, 64.0, 128.0)


def dense(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:
    """What a layer makes of [..., in]: weights are [out, in]."""
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
    out = np.zeros((len(rows), len(weight)), np.float32)
    _add(rows, np.ascontiguousarray(weight.T, np.float32), out)
    if bias is not None:
        out += bias
    return out.reshape(*x.shape[:-1], len(weight))


@compiled
def _add(x: H2, weight: H2, out: H2) -> None:
    """out += x · weight, the inner dimension first to last."""
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            one = x[i, k]
            if one != 0:
                for j in range(out.shape[1]):
                    out[i, j] += one * weight[k, j]


SIZES |= {"conv_dgrad": SIZES["conv"], "conv_wgrad": SIZES["conv"]}


@dataclass(frozen=True)
class Trees:
    """Complete binary trees of one depth: node i has children 2i+1 (at most) and 2i+2 (above)."""

    feature: npt.NDArray[np.int16]  # trees × inner nodes
    above: npt.NDArray[np.float32]  # trees × inner nodes
    leaf: npt.NDArray[np.float32]  # trees × leaves
    low: Reals  # box: the least of each size
    high: Reals
    sigma: float  # spread of ln(measured/priced) on ranges left out of training

    def predict(self, rows: Reals) -> Reals:
        """The sum of all trees for each row of features."""
        inner = self.feature.shape[1]
        total, every = np.zeros(len(rows)), np.arange(len(rows))
        for feature, above, leaf in zip(self.feature, self.above, self.leaf, strict=True):
            node = np.zeros(len(rows), np.intp)
            while node[0] < inner:
                node = 2 * node + 1 + (rows[every, feature[node]] > above[node])
            total += leaf[node - inner]
        return total


@cache
def shipped_trees() -> Mapping[str, Trees]:
    """Trees by `device op dtype`; empty where none beat the formula."""
    path = files("foretell.cost").joinpath("tables", "kernel_learned.npz")
    if not path.is_file():
        return {}
    with np.load(BytesIO(path.read_bytes())) as arrays:
        keys = sorted({name.rpartition("/")[0] for name in arrays.files})
        return {key: _trees(arrays, key) for key in keys}


def _trees(arrays: Mapping[str, npt.NDArray[np.float32]], key: str) -> Trees:
    low, high = arrays[f"{key}/box"].astype(float)
    return Trees(
        feature=arrays[f"{key}/feature"].astype(np.int16),
        above=arrays[f"{key}/above"],
        leaf=arrays[f"{key}/leaf"],
        low=low,
        high=high,
        sigma=float(arrays[f"{key}/sigma"]),
    )


def learned_seconds(
    device: Device,
    op: str | Sequence[str],
    dtype: str | Sequence[str],
    shape: Shapes,
    *,
    trees: Mapping[str, Trees] | None = None,
) -> Price:
    """Time of each kernel that lies where the trees were trained; nan elsewhere."""
    known = shipped_trees() if trees is None else trees
    length = kernel.length_of(op, dtype, shape)
    given = columns(shape or {}, length)
    out, sigma = np.full(length, np.nan), np.full(length, np.nan)
    for (name, kind), rows in kernel.groups_of(op, dtype, length):
        mine = known.get(f"{device.name} {name} {kind}")
        if mine is None or not set(SIZES[name]) - _ONE - {"pad"} <= set(given):
            continue
        part = {k: v[rows] for k, v in given.items()}
        inside = rows[_inside(mine, name, part)]
        if len(inside):
            part = {k: v[inside] for k, v in given.items()}
            formula = kernel.seconds(device, name, kind, part).seconds
            out[inside] = formula * portable.exp(
                mine.predict(features(device, name, part, formula))
            )
            sigma[inside] = mine.sigma
    return Price(out, sigma)


def _inside(trees: Trees, op: str, shape: Mapping[str, Reals]) -> npt.NDArray[np.bool_]:
    sizes = logs(op, shape)
    inside: npt.NDArray[np.bool_] = np.all(
        (sizes >= trees.low - 1e-6) & (sizes <= trees.high + 1e-6), axis=1
    )
    return inside


def logs(op: str, shape: Mapping[str, Reals]) -> Reals:
    """log2 of one plus each size of a shape: a padding may be 0."""
    length = len(next(iter(shape.values())))
    return portable.log2(1 + np.stack([_column(shape, key, length) for key in SIZES[op]], axis=1))


def _column(shape: Mapping[str, Reals], key: str, length: int) -> Reals:
    usual = 1.0 if key in _ONE else 0.0
    if key not in shape:
        return np.full(length, usual)
    values = np.asarray(shape[key], float)
    missing = values != values
    return np.where(missing, usual, values)


def features(device: Device, op: str, shape: Mapping[str, Reals], formula: Reals) -> Reals:
    """What the trees look at: sizes, remainders on tiles, waves over units, the formula."""
    length = len(formula)
    get = {key: _column(shape, key, length) for key in (*SIZES[op], *_FLAGS[op])}
    if op == "gemm":
        rows, cols, deep, many = get["m"], get["n"], get["k"], get["b"]
    else:
        out = np.floor((get["h"] + 2 * get["pad"] - get["r"]) / get["stride"]) + 1
        rows, cols, many = get["n"] * out * out, get["k"], get["groups"]
        deep = get["c"] / get["groups"] * get["r"] * get["s"]
    work = 2 * many * rows * cols * deep
    found = [*logs(op, shape).T, *(get[k] for k in _FLAGS[op])]
    found += [portable.log2(formula), portable.log2(work / formula), portable.log2(rows / cols)]
    for tile in _TILES:
        found += [np.mod(rows, tile) / tile, np.mod(cols, tile) / tile]
    for tile in _TILES[1:]:
        blocks = many * np.ceil(rows / tile) * np.ceil(cols / tile) / device.units
        found += [portable.log2(blocks), blocks - np.floor(blocks)]
    found += [np.mod(deep, 8.0), np.mod(cols, 8.0)]
    if op != "gemm":
        found += [np.mod(get["h"], 4.0), np.mod(get["h"], 8.0)]
    return np.stack(found, axis=1)


COPY_START = 4e-6  # seconds before a copy over the host's bus moves anything: a DMA set-up
COPY_SIGMA = 0.25  # pinned memory reaches most of the bus, pageable half of it; nothing says which


class Operators:
    """A price model applied to the kernels of each operator."""

    def __init__(self, model: Model, *, plain: bool = False) -> None:
        self.model, self.plain = model, plain
        self.name: str = model.name
        self.source: Source = model.source

    def price(self, work: Work) -> tuple[Array, Array]:
        row, found = _spelled(work, self.plain)
        by_kernel = replace(
            work.take(row),
            op=tuple(k.op for k in found),
            shape=tuple(k.shape for k in found),
            flops=np.array([k.flops for k in found]),
            bytes=np.array([k.bytes for k in found]),
        )
        seconds, sigma = self.model.price(by_kernel)
        return _summed(row, seconds * np.array([k.times for k in found]), sigma, len(work))


def _spelled(work: Work, plain: bool) -> tuple[Array, list[Kernel]]:
    """Every operator as its kernels, and for each kernel the row it came from."""
    rows: list[int] = []
    found: list[Kernel] = []
    for r in range(len(work)):
        whole = work.op[r], work.shape[r], float(work.bytes[r]), float(work.flops[r])
        parts: tuple[Kernel, ...] = (Kernel(*whole),)
        if work.kind[r] == Kind.KERNEL and is_call(work.shape[r]):
            parts = kernels(*whole)
            parts = tuple(map(_without_layout, parts)) if plain else parts
        rows += [r] * len(parts)
        found += parts
    return np.array(rows, np.int64), found


def _without_layout(kernel: Kernel) -> Kernel:
    """A product's sizes alone: tables of linear layers do not say how operands lie in memory."""
    sizes = [p for p in kernel.shape.split(",") if not p.startswith(("ta=", "tb="))]
    return replace(kernel, shape=",".join(sizes))


def _summed(row: Array, seconds: Array, sigma: Array, size: int) -> tuple[Array, Array]:
    """Sums by row; the spread of a sum of parts that err together."""
    total = np.zeros(size)
    spread = np.zeros(size)
    np.add.at(total, row, seconds)
    np.add.at(spread, row, np.where(np.isnan(seconds), 0.0, seconds * sigma))
    known = total > 0
    return total, np.divide(spread, total, out=np.zeros(size), where=known)


class KernelFormula:
    """Roofline with efficiency curves, by op class, shape and number format."""

    name = "kernel formula"
    source = Source.FORMULA

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = _unknown(work)
        is_known = (work.kind == Kind.KERNEL) & self.knows(work)
        for device, rows in _by_device(work, np.flatnonzero(is_known)):
            found = self.formula(device, work.take(rows))()
            seconds[rows], sigma[rows] = found.seconds, np.nan_to_num(found.sigma)
        return seconds, sigma

    def knows(self, work: Work) -> Array:
        """Where something is known that a price can be made of."""
        found: Array = _has_shape(work) | (work.flops > 0) | (work.bytes > 0)
        return found

    def formula(self, device: Device, work: Work) -> Callable[[], kernel.Price]:
        """What prices work on one device."""
        formats = _formats(work.dtype)
        return partial(kernel.seconds, device, work.op, formats, work.shape, work.flops, work.bytes)


class LearnedKernel(KernelFormula):
    """A correction learned on devices that were measured densely; passes everywhere else."""

    name = "learned kernel"
    source = Source.LEARNED

    def knows(self, work: Work) -> Array:
        """Where there is a shape."""
        return _has_shape(work)

    def formula(self, device: Device, work: Work) -> Callable[[], kernel.Price]:
        """What prices work on one device."""
        return partial(learned_seconds, device, work.op, _formats(work.dtype), work.shape)


class CopyFormula:
    """Bytes over the host's bus, or over the device's own memory where the op says so."""

    name = "copy formula"
    source = Source.FORMULA

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = _unknown(work)
        moved = np.where(work.bytes > 0, work.bytes, work.comm_bytes)
        for r in np.flatnonzero((work.kind == Kind.COPY) & (moved > 0)).tolist():
            rank = int(work.rank[r])
            rate = work.cluster.host_bandwidth(rank)
            if work.op[r] in ("d2d", "memset", "copy"):  # inside a device it is read and written
                rate = work.cluster.devices[rank].memory_bandwidth / 2
            seconds[r], sigma[r] = COPY_START + moved[r] / rate, COPY_SIGMA
        return seconds, sigma


class CollectiveFormula:
    """α–β by algorithm, protocol and topology, the quickest way as NCCL would take it."""

    name = "collective formula"
    source = Source.FORMULA

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = _unknown(work)
        known = (*COLLECTIVES, "send", "gather", "scatter")
        for r in range(len(work)):
            if work.kind[r] in (Kind.COLLECTIVE, Kind.SEND) and work.op[r] in known:
                levels = work.cluster.levels(_ranks(work, r))
                found = collective.price(work.op[r], float(work.comm_bytes[r]), levels)
                seconds[r], sigma[r] = found.seconds, found.sigma
        return seconds, sigma


def _ranks(work: Work, r: int) -> Sequence[int]:
    """The ranks that communicate; all of the cluster where nothing says which."""
    return ranks_of(work.group[r]) or range(work.cluster.size)


def _unknown(work: Work) -> tuple[Array, Array]:
    return np.full(len(work), np.nan), np.zeros(len(work))


def _has_shape(work: Work) -> Array:
    return np.array([bool(text) for text in work.shape], bool)


def _by_device(work: Work, rows: Array) -> Iterator[tuple[Device, Array]]:
    """Rows grouped by the kind of device they run on."""
    devices = [work.cluster.devices[int(rank)] for rank in work.rank[rows]]
    names = np.array([device.name for device in devices])
    for name in dict.fromkeys(names.tolist()):
        mine = np.flatnonzero(names == name)
        yield devices[int(mine[0])], rows[mine]


def _formats(dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """Number formats a formula knows; work without one is priced as fp32."""
    return tuple("fp32" if d in ("none", "complex64") else d for d in dtypes)
