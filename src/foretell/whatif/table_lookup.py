"""Kernels in another number format or memory layout, priced from the measured tables.

    sorts = sorted_kernels(graph)                one `Sort` for each distinct (op, shape, phase)
    factor, sigma = changed(sorts, before, after)        how many times as long each sort takes

An operator the tables do not know is taken for a pass over as many numbers (`PASS`). What a format
does to PyTorch's own kernels depends on their access pattern, which their names show (`powers`). A
kernel that takes several numbers at a time lasts as long as its bytes; one that works out an offset
for every number (a broadcast, a transposed tensor) or adds along an axis hardly cares how wide they
are. What the tables say of a plain pass is taken to a power: 1 for the first, little for the
others. From four models traced with and without autocast on an H200 (benchmarks/measured/h200 and
its folder `half`): of kernels above 10 µs, indexed 0.80 to 0.96 of their time in fp32, reductions
0.82 to 0.91, fills 0.71, a softmax of long rows 0.59 to 0.67, the rest 0.48 to 0.52.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from foretell import portable
from foretell.cost.aten import RULES, Call, is_cudnn_order, is_cudnn_transposed, read
from foretell.cost.kernel import is_call, passes
from foretell.cost.kernel import parse_shape as parse
from foretell.cost.ratios import Times, Way, ratios, times
from foretell.graph.edit import Edit
from foretell.graph.graph import NONE, Array, Graph, Kind, Phase
from foretell.operators import PRODUCTS, having
from foretell.whatif.base import DoesNotApply, Setting
from foretell.whatif.calls import launch_of, operators
from foretell.whatif.machine import device_named, device_of

CONVOLUTIONS = frozenset(
    {"convolution", "convolution_backward", "cudnn_convolution", "_conv_depthwise2d"}
)
PASS = "add"  # the row of a plain pass over memory
# Where the layout of a row does not matter, the one that most rows have.
ROWS = having("measured")
IMAGES = frozenset({"batch_norm", "group_norm", "max_pool", "avg_pool"})
BY_ROW = frozenset({"layer_norm", "softmax"})


@dataclass(frozen=True)
class KernelGroup:
    """Kernels of one operator and one shape: a row of the tables, and who they are."""

    op: str  # as PyTorch calls it
    rows: tuple[tuple[str, str], ...]  # op and direction in the tables; several are added up
    sizes: dict[str, float]
    elements: float  # numbers in its largest input
    kernels: Array  # task ids
    phase: int
    calls: int = 0  # of the operator; 0 where the host's part is not given

    @property
    def is_product(self) -> bool:
        """Whether tensor cores could do it."""
        return self.rows[0][0] in ("linear", "bmm", "conv2d", "conv3d", "convt2d", "lstm", "gru")


def kernel_groups(graph: Graph) -> list[KernelGroup]:
    """The device work of a step by operator, shape and phase."""
    tasks = np.flatnonzero(graph.kind == Kind.KERNEL)
    if not len(tasks):
        return []
    keys = np.stack([graph.op[tasks], graph.shape[tasks], graph.phase[tasks]], axis=1)
    unique, place = np.unique(keys, axis=0, return_inverse=True)
    place = place.reshape(-1)
    order = np.argsort(place, kind="stable")
    ends = np.cumsum(np.bincount(place, minlength=len(unique)))
    members = np.split(tasks[order], ends[:-1])
    names = [(graph.names[int(o)], graph.names[int(s)], int(p)) for o, s, p in unique]
    layers = _layers(names)
    call = _calls(graph, tasks)
    return [
        replace(kernel_group(op, shape, phase, kernels, layers), calls=_count(call[kernels]))
        for (op, shape, phase), kernels in zip(names, members, strict=True)
    ]


def _calls(graph: Graph, tasks: Array) -> Array:
    """For every task the number of the operator that launched it."""
    found = np.full(graph.size, NONE, np.int64)
    launch = launch_of(graph, tasks)
    known = launch != NONE
    found[tasks[known]] = operators(graph)[launch[known]]
    return found


def _count(calls: Array) -> int:
    """How many calls; none where one is not known."""
    return 0 if (calls == NONE).any() else len(np.unique(calls))


def _layers(names: list[tuple[str, str, int]]) -> frozenset[tuple[float, float, float]]:
    """The sizes m, n, k of every product of the forward pass."""
    return frozenset(
        _product(op, read(op, shape))
        for op, shape, phase in names
        if op in PRODUCTS and is_call(shape) and phase in (Phase.FORWARD, Phase.LOSS)
    )


def kernel_group(
    op: str,
    shape: str,
    phase: int,
    kernels: Array,
    layers: frozenset[tuple[float, float, float]] = frozenset(),
) -> KernelGroup:
    """One operator as rows of the tables."""
    call = read(op, shape) if is_call(shape) else None
    elements = elements_of(call) if call else 1
    rows: tuple[tuple[str, str], ...] = ((PASS, "forward"),)
    sizes: dict[str, float] = {"n": float(elements)}
    if call:
        with suppress(IndexError, ValueError):  # another version of the operator
            rows, sizes = _row(op, call, phase, layers, float(elements))
    return KernelGroup(op, rows, sizes, float(elements), kernels, phase)


def elements_of(call: Call) -> float:
    """Numbers in the largest input; a list of tensors is one."""
    lists = [sum(math.prod(dims) for dims in each) for each in call.lists if each]
    return float(max([*(call.size(i) for i in call.tensors()), *lists], default=1))


def _row(
    op: str, call: Call, phase: int, layers: frozenset[tuple[float, float, float]], n: float
) -> tuple[tuple[tuple[str, str], ...], dict[str, float]]:
    if op in PRODUCTS:
        return _product_row(op, call, phase, layers)
    if "convolution" in op:
        return _convolution_row(op, call)
    if op in PLACES:
        return _attention_row(op, call)
    if op.startswith("_cudnn_rnn"):
        return _recurrent_row(op, call)
    row = ROWS.get(op) or ROWS.get(op.removesuffix("_backward").removesuffix("_"))
    if row:
        return ((row, "backward" if "backward" in op else "forward"),), _sizes(row, call, n)
    return ((PASS, "forward"),), {"n": n}


def _product(op: str, call: Call) -> tuple[float, float, float]:
    at = PRODUCTS[op]
    a, b = call.dims[at], call.dims[at + 1]
    return float(a[-2]), float(b[-1]), float(a[-1])


def _product_row(
    op: str, call: Call, phase: int, layers: frozenset[tuple[float, float, float]]
) -> tuple[tuple[tuple[str, str], ...], dict[str, float]]:
    """A linear layer's product is one of three: y = x·Wᵀ, dx = dy·W, dW = dyᵀ·x."""
    m, n, k = _product(op, call)
    if op in ("bmm", "baddbmm"):
        count = float(call.dims[PRODUCTS[op]][0])
        return (("bmm", "forward"),), {"b": count, "m": m, "n": n, "k": k}
    if phase == Phase.BACKWARD and (m, k, n) in layers:
        return (("linear", "dgrad"),), {"m": m, "n": k, "k": n}
    if phase == Phase.BACKWARD and (k, m, n) in layers:
        return (("linear", "wgrad"),), {"m": k, "n": m, "k": n}
    return (("linear", "forward"),), {"m": m, "n": n, "k": k}


def _convolution_row(op: str, call: Call) -> tuple[tuple[tuple[str, str], ...], dict[str, float]]:
    is_back = op == "convolution_backward"
    x, at = (1, 4) if is_back else (0, 3)
    image, weight = call.dims[x], call.dims[x + 1]
    turned = at + 3 < len(call.values) and call.values[at + 3] == "True" and call.dims[x] != ()
    if not is_back and is_cudnn_order(call):
        turned = is_cudnn_transposed(call)
    groups = 1 if turned else max(1, image[1] // max(1, weight[1]))
    each = strides_of(call, at, len(image) - 2)
    stride = math.sqrt(math.prod(each))  # rows have one for both sides of an image
    name = "conv3d" if len(image) == 5 else "conv2d"
    keys = ("t", "h", "w")[-(len(image) - 2) :]
    # A transposed convolution is the gradient of one from its output to its input, and run as that.
    pairs = zip(image[2:], each, strict=True)
    sides = [float(n * s if turned and n > 1 else n) for n, s in pairs]
    inside, outside = (weight[1], image[1]) if turned else (image[1], weight[0])
    sizes = dict(zip(keys, sides, strict=True)) | {
        "n": image[0], "c": inside, "k": outside, "r": weight[2] if len(weight) > 3 else 1,
        "s": weight[-1], "stride": stride, "groups": groups,
    }  # fmt: skip
    data, back = ("dgrad", "forward") if turned else ("forward", "dgrad")
    if not is_back:
        return ((name, data),), sizes
    wanted = [word in ("True", "1") for word in call.values[-1].split("x")]
    parts = [w for w, is_in in zip((back, "wgrad"), wanted, strict=False) if is_in]
    return tuple((name, part) for part in parts or (back, "wgrad")), sizes


def strides_of(call: Call, at: int, sides: int) -> tuple[int, ...]:
    """Strides of a convolution; backends put their own arguments, sizes or padding, before."""
    lists = [i for i, kind in enumerate(call.types) if kind == "ScalarList"]
    behind = [i for i in lists if i >= at]
    if lists and lists[0] < at and at == 3:  # no bias between weight and lists: a backend's own
        behind = lists[2 if is_cudnn_transposed(call) else 1 :]
    numbers = call.numbers(behind[0]) if behind else ()
    numbers = tuple(max(1, n) for n in numbers[-sides:]) or (1,)
    return numbers * sides if len(numbers) == 1 else (1,) * (sides - len(numbers)) + numbers


# Where attention has its mask (none has no place for one) and its scale among its inputs.
PLACES: dict[str, tuple[int | None, int]] = {
    "_efficient_attention_forward": (3, 11), "_efficient_attention_backward": (4, 16),
    "_cudnn_attention_forward": (3, 12), "_cudnn_attention_backward": (8, 15),
    "_flash_attention_forward": (None, 10), "_flash_attention_backward": (None, 14),
}  # fmt: skip


def _attention_row(op: str, call: Call) -> tuple[tuple[tuple[str, str], ...], dict[str, float]]:
    mask, scale = PLACES[op]
    known = replace(call, values=(*call.values, *["-"] * scale))  # a trace need not have them
    sizes = dict(parse(RULES[op](known)[0].shape))
    sides = ("sq", "sk") if not sizes["direction"] else ("sk", "sq")  # blocks take one side each
    sizes |= {"h": sizes.pop("heads")} | dict(zip(("s", "sk"), map(sizes.pop, sides), strict=True))
    sizes["mask"] = float(mask is not None and call.dims[mask : mask + 1] not in ((), ((),)))
    return (("attention", "backward" if sizes.pop("direction") else "forward"),), sizes


_MODE = {"2": "lstm", "3": "gru"}  # cudnnRNNMode_t


def _recurrent_row(op: str, call: Call) -> tuple[tuple[tuple[str, str], ...], dict[str, float]]:
    """A stack of recurrent layers; of two directions each is a layer."""
    is_back = op.endswith("backward")
    said = dict(enumerate(call.values[10 if is_back else 6 :]))
    is_both, by_sample = (said.get(k, "") == "True" for k in (7, 4))
    first, second, *inside = call.dims[0] if len(call.dims[0]) > 1 else (1, 1)
    hidden, layers = (_number(said.get(k, "")) for k in (1, 3))
    sizes = {
        "s": second if by_sample else first, "b": first if by_sample else second,
        "n": hidden if hidden > 0 else float(inside[0] if inside else second),
        "layers": (layers if layers > 0 else 1.0) * (1 + is_both),
    }  # fmt: skip
    row = _MODE.get(said.get(0, ""), "lstm")
    return ((row, "backward" if is_back else "forward"),), sizes


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _sizes(op: str, call: Call, n: float) -> dict[str, float]:
    dims = call.dims[call.tensors()[0]]
    if op in IMAGES and len(dims) >= 2:
        sides = dims[2:] or (1,)
        return {"n": dims[0], "c": dims[1], "h": math.prod(sides[:-1]), "w": sides[-1]}
    if op in BY_ROW and dims:
        return {"m": n / dims[-1], "n": dims[-1]}
    return {"n": n}


def changed(
    sort: KernelGroup, before: Way, after: Way, each: float = 0.0
) -> tuple[float, float] | None:
    """How many times as long a sort takes another way, and the spread of its logarithm.

    Several rows count by the time they take; None where the tables know none of them both ways.
    `each` is what one call took on the device of the tables: then what they say of the second way
    is heard too, and the surer of the two counts more.
    """
    sizes = {key: np.array([float(value)]) for key, value in sort.sizes.items()}
    found = [ratios(*row, sizes, before, after) for row in sort.rows]
    known = [f for f in found if f is not None]
    if not known:
        return None
    seconds = np.array([float(f.seconds[0]) for f in known])
    factors = np.array([float(f.factor[0]) for f in known])
    sigma = float(np.sqrt(np.mean([float(f.sigma[0]) ** 2 for f in known])))
    factor = float((seconds * factors).sum() / seconds.sum())
    then = [times(*row, sizes, after) for row in sort.rows] if each > 0 else [None]
    if any(t is None for t in then):
        return factor, sigma
    return _both(factor, sigma, [t for t in then if t is not None], each)


def _both(factor: float, sigma: float, then: list[Times], each: float) -> tuple[float, float]:
    """What a ratio and the times of the second way say together."""
    seconds = np.array([float(t.seconds[0]) for t in then])
    share = seconds / seconds.sum()
    own = float(np.sqrt((share * np.array([float(t.sigma[0]) ** 2 for t in then])).sum()))
    weight = sigma**2 / (sigma**2 + own**2)  # of the times
    format_change = math.log(float(seconds.sum()) / each)
    mixed = math.exp(weight * format_change + (1 - weight) * math.log(factor))
    return mixed, math.sqrt(weight**2 * own**2 + (1 - weight) ** 2 * sigma**2)


def powers(graph: Graph, tasks: Array) -> Array:
    """For each kernel the power of a plain pass's ratio that it follows."""
    unique, place = np.unique(graph.name[tasks], return_inverse=True)
    table = np.array([_power(graph.names[int(k)]) for k in unique], float)
    found: Array = table[place.reshape(-1)]
    return found


def _power(name: str) -> float:
    known = passes()["power"]
    return float(next((row["power"] for row in known if re.search(row["kernel"], name)), 1.0))


REFERENCE = "h200"  # the device whose table is read
CONVOLVES = frozenset({"conv2d", "conv3d", "convt2d"})
LAID_OUT = CONVOLVES | IMAGES  # rows that tell one image layout from another
RECURRENT = frozenset({"lstm", "gru"})
WHOLE = LAID_OUT | BY_ROW | RECURRENT | {"linear", "bmm", "attention"}  # no passes over memory


class Change(NamedTuple):
    """What becomes of a sort of kernels: how many times as long, how sure, in which format."""

    sort: KernelGroup
    factor: float
    sigma: float
    dtype: str


def _measured(dtype: str) -> str:
    return "bf16" if dtype == "fp16" else dtype


def format_change(
    graph: Graph, setting: Setting, sort: KernelGroup, before: str, after: str, layout: str = ""
) -> tuple[float, float] | None:
    """What the tables say of a sort in another format or another image layout.

    fp16 is given by rows of bf16 where it was not measured.
    """
    now = layout_of(graph, sort)
    here, gain = _place(graph, setting, sort, before, after)
    each = float(graph.seconds[sort.kernels].sum()) / sort.calls if here and sort.calls else 0.0
    found = None
    for first, then in dict.fromkeys([(before, after), (_measured(before), _measured(after))]):
        if found is None:
            found = changed(sort, way(first, now, sort), way(then, layout or now, sort), each)
    if found is None:
        return None
    if sort.rows[0][0] in CONVOLVES and _is_plain(graph, sort):
        return 1.0, found[1]
    if sort.rows[0][0] not in WHOLE:
        return _walked(graph, sort, *found)
    return found[0] * gain / _stays(graph, sort), found[1]


def _is_plain(graph: Graph, sort: KernelGroup) -> bool:
    """Whether PyTorch's own kernels of one filter a channel over volumes do a convolution.

    They know no tensor cores and take as long in any format: 0.93 to 1.04 times (H200).
    """
    names = (graph.names[int(n)] for n in np.unique(graph.name[sort.kernels]))
    return all("conv_depthwise3d" in name for name in names)


def _place(
    graph: Graph, setting: Setting, sort: KernelGroup, before: str, after: str
) -> tuple[bool, float]:
    """Whether a step runs on the device of the tables; what its matmuls gain less or more."""
    try:
        device = device_of(graph, setting)
    except DoesNotApply:
        return False, 1.0
    if device.name == REFERENCE or not sort.is_product or before == after:
        return device.name == REFERENCE, 1.0
    gains = [d.peak(after) / d.peak(before) for d in (device_named(REFERENCE), device)]
    return False, gains[0] / gains[1]


def _walked(graph: Graph, sort: KernelGroup, factor: float, sigma: float) -> tuple[float, float]:
    """A plain pass, as its kernels go over memory."""
    seconds = graph.seconds[sort.kernels]
    each = portable.power(factor, powers(graph, sort.kernels))
    total = float(seconds.sum())
    return (float((seconds * each).sum()) / total if total > 0 else factor), sigma


def way(dtype: str, layout: str, sort: KernelGroup) -> Way:
    """A format and layout as the rows of a sort call them."""
    row = sort.rows[0][0]
    if row == "attention":
        return Way(dtype, "efficient" if dtype in ("fp32", "tf32") else "cudnn")
    if row == PASS:
        return Way(dtype, "-")
    return Way(dtype, layout if row in LAID_OUT else "")


def image_layout(graph: Graph) -> str:
    """The memory layout images have in a step: as an earlier what-if left it, or as given."""
    if any(spec.startswith("channels-last") for spec in graph.history):
        return "nhwc"
    return "nchw"


def layout_of(graph: Graph, sort: KernelGroup) -> str:
    """The image layout of one operator: a kernel for channels last with nothing turned round."""
    names = {graph.names[int(n)].lower() for n in np.unique(graph.name[sort.kernels])}
    last = any("nhwc" in name or "channels_last" in name for name in names)
    if last and not any("nchw" in name for name in names):
        return "nhwc"
    return image_layout(graph)


# What a matmul of a recurrent layer in fp32 needs beside it at every step of time, cleared or added
# up by kernels of its own; tensor cores do it in one (cuDNN 9 on an H200, a GRU and an LSTM).
_HELPERS = re.compile(r"memset|scal_kernel|splitkreduce", re.IGNORECASE)


def _stays(graph: Graph, sort: KernelGroup) -> float:
    """The share of a recurrent layer's time that is not its helpers', which are dropped."""
    if sort.rows[0][0] not in RECURRENT:
        return 1.0
    names = (graph.names[int(n)] for n in graph.name[sort.kernels])
    kept = np.array([not _HELPERS.search(name) for name in names], bool)
    seconds = graph.seconds[sort.kernels]
    return float(seconds[kept].sum()) / float(seconds.sum()) if seconds[kept].any() else 1.0


def without_helpers(edit: Edit, graph: Graph) -> None:
    """Drop what recurrent layers in fp32 launch beside their matmuls."""
    codes = [int(k) for k in np.unique(graph.op) if graph.names[int(k)].startswith("_cudnn_rnn")]
    mine = np.isin(graph.op, codes) & np.isin(graph.kind, (Kind.KERNEL, Kind.COPY))
    named = np.array([bool(_HELPERS.search(graph.names[int(n)])) for n in graph.name[mine]], bool)
    gone = np.flatnonzero(mine)[named]
    launches = launch_of(graph, gone)
    edit.remove(gone)
    edit.remove(np.unique(launches[launches != NONE]))


def retimed(edit: Edit, graph: Graph, changes: list[Change]) -> None:
    """Multiply the time of every sort, widen its error and say its new format."""
    for sort, factor, sigma, dtype in changes:
        tasks = sort.kernels
        edit.set(
            tasks,
            seconds=graph.seconds[tasks] * factor,
            sigma=portable.hypot(graph.sigma[tasks], sigma),
            dtype=dtype,
        )
