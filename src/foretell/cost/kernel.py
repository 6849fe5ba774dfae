"""How long compute kernels take on a device, from their op, shape and number format.

    price = seconds(device, "gemm", "bf16", ["m=4096,n=4096,k=4096"])
    price.seconds, price.sigma

Every kernel is an op (`gemm`, `conv`, `conv_dgrad`, `conv_wgrad`, `attention`, or a class bound by
memory), a number format and a shape (→ `foretell.cost.shape`). Where the shape is missing, flop and
bytes alone give a roofline. `sigma` is the spread of ln(measured/priced) on
kernels the constants were not fitted to: exp(±1.28·sigma) bounds 80 %.

Fused attention (flash): softmax(Q·Kᵀ)·V without the scores ever reaching memory.

A block owns `tile` queries of one head and walks the keys they see: all, about half of them where
causal, at most `window` of them. It does 4·tile·keys·d flop forward, 2.5 times that backward (five
matmuls for two), `edge` of a tile on the diagonal where causal, and `ahead` (`behind` in the
backward) keys' worth of work besides: loads before the first product, the gradient of Q summed in
fp32. Blocks go out in
waves like the tiles of a product, at `peak` of what the pipe can do, while each score takes
`scores` cycles of a unit for its exponential and `dropout` more for a random number. Q, K, V and O
move once. Unfused attention is two matmuls and a softmax.

Kernels written for the chip (cuDNN, FlashAttention-3) are what PyTorch and Transformer Engine pick
by default; FlashAttention-2 (`flash2`) keeps Ampere's instructions, which reach a share of a newer
chip's peak. `benchmarks/fit_attention.py` fits both to an H200; on A100 FlashAttention-2 (Dao 2023,
fig. 4-6) reaches 190-220 forward, 170-200 backward of 312 Tflop/s at d = 128.

Kernels that move more than they compute: time by what they touch.

    stream   bytes / (bandwidth · share), faster where the bytes still lie in the second-level cache
    issue    elements / (units · clock · rate): instructions, not bytes, bound odd strides, small
             formats and transcendental functions
    turns    rows · cycles / (units · clock): ops that give each row to one block pay for every row
    lone     the longest row at one block's pace, for ops that give each channel to one block: few
             channels leave most of the device idle

They overlap as t = (Σ tᵢᵖ)^(1/p) + start. Constants are fitted per class of op (→ `seconds`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster.node import Device
from foretell.cost import gemm
from foretell.cost.limits import Constants, Limits, limits, passes, shipped
from foretell.cost.shape import columns

_DEEP = 128.0  # wider heads leave the backward too few registers
Array = npt.NDArray[np.float64]
Fitted = Mapping[str, float]
Formula = Callable[[], Array]  # with the input it has


Shapes = Sequence[str] | Mapping[str, npt.ArrayLike] | None
# What an op is priced as where it has no class of its own.
_CLASSES = {
    "gelu": "activation",
    "silu": "activation",
    "tanh": "activation",
    "sigmoid": "activation",
    "exp": "activation",
    "relu": "elementwise",
    "cast": "copy",
    "cat": "copy",
    "transpose": "copy",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "layer_norm_backward": "norm_backward",
    "rms_norm_backward": "norm_backward",
    "log_softmax": "softmax",
    "log_softmax_backward": "softmax_backward",
    "loss": "softmax",
    "mean": "reduce",
    "sum": "reduce",
}
# Launches' worth of host time that one eager PyTorch call takes, dispatch and autograd included:
# the shortest readings of NeuSight's events (A100, P4 and T4 hosts) less the 7 µs of an empty pair
# of events in its model labels, over the 5 µs of `Device.launch`.
_CALLS = {"elementwise": 4.4, "softmax": 5.2, "norm": 7.8, "gemm": 7.0, "conv": 12.6}
_CALL = 5.0  # any other
# Chips whose matrix units reach their rate only with instructions FlashAttention-2 does not use.
_NEWER = ("hopper", "blackwell")
# PyTorch has no fused attention for them (pytorch/pytorch issue 141958, 2024, of gfx908).
_WITHOUT_FUSED_ATTENTION = ("vega", "cdna")
_BARE = 1.5  # a kernel known by flop and bytes alone is surer of nothing than its class is
_NEEDS = {
    "gemm": ("m", "n", "k"),
    "conv": ("n", "c", "h", "w", "k", "r", "s"),
    "conv_dgrad": ("n", "c", "h", "w", "k", "r", "s"),
    "conv_wgrad": ("n", "c", "h", "w", "k", "r", "s"),
    "attention": ("sq", "sk", "d"),
}


@dataclass(frozen=True)
class Attention:
    """Attentions as columns of one length; causal, backward and dropout are 0 or 1."""

    b: Array
    heads: Array
    sq: Array
    sk: Array
    d: Array
    causal: Array
    backward: Array
    dropout: Array
    window: Array  # keys a query sees at most; 0: all


def visible(sk: Array | float, causal: Array | float, window: Array | float) -> Array:
    """Keys that a query sees on average: of a causal window w over s, w − w·(w − 1)/2s."""
    size = np.where(np.asarray(window) > 0, np.minimum(window, sk), sk)
    out: Array = np.where(np.asarray(causal) > 0, size - size * (size - 1) / (2 * sk), size)
    return out


def attention_seconds(limits: Limits, product: Fitted, fitted: Fitted, a: Attention) -> Array:
    """Time of each fused attention."""
    is_back = a.backward > 0
    blocks = a.b * a.heads * np.ceil(a.sq / fitted["tile"])
    resident = fitted["resident"]
    turns = np.ceil(blocks / (limits.units * resident))
    rows = turns * limits.units * resident * fitted["tile"]
    seen = visible(a.sk, a.causal, a.window)
    walked = seen + np.where(is_back, fitted["behind"], fitted["ahead"])
    walked = walked + np.where(a.causal > 0, fitted["tile"] * fitted["edge"], 0.0)
    deep = np.maximum(a.d / _DEEP, 1.0) ** fitted["deep"]
    times = np.where(is_back, 2.5 * fitted["backward"] * deep, 1.0)
    work = 4 * rows * walked * np.maximum(a.d, fitted["depth"]) * times
    compute = gemm.throttled(limits, product, work, np.array(limits.peak * fitted["peak"]))
    cycles = (fitted["scores"] + fitted["dropout"] * a.dropout) * np.where(is_back, 2.0, 1.0)
    scores = rows * walked * cycles / (limits.units * limits.clock)
    tensors = a.b * a.heads * a.d * (2 * a.sq + 2 * a.sk) * np.where(is_back, 2.0, 1.0)
    memory = tensors * limits.size / (limits.stream * fitted["bandwidth"])
    busy = gemm.norm(fitted["overlap"], compute, scores, memory)
    out: Array = busy + limits.floor * fitted["launches"] * np.where(is_back, 2.0, 1.0)
    return out


# PyTorch adds up gradients of looked-up rows one by one up to this many and sorts them where more
# were (ATen/native/cuda/Embedding.cu). Where a table has far fewer rows than that, a further one
# then takes a twentieth (embedding rows of `tables/measured/h200.csv.gz`: 2048 in a table of 1024
# 55 µs, 4096 of 2 87 µs, 34624 of 96 131 µs, 65536 of 1000 152 µs).
_ONE_BY_ONE, _FEW, _SORTED = 3072.0, 4.0, 0.05


def added_rows(rows: Any, table: Any) -> Any:
    """Rows that the gradient of a look-up costs, where `rows` were taken from a table."""
    quick = np.minimum(rows, _ONE_BY_ONE) + _SORTED * np.maximum(rows - _ONE_BY_ONE, 0.0)
    return np.where(_FEW * np.asarray(table) < rows, quick, rows)


def memory_bound_seconds(
    limits: Limits,
    shared: Mapping[str, float],
    fitted: Mapping[str, float],
    moved: Array,
    n: Array,
    rows: Array,
    uneven: Array,
) -> Array:
    """Time of each kernel; `moved` bytes over `n` elements in `rows` rows.

    `uneven` is 1 where inputs are broadcast, strided or of mixed formats.
    """
    kept = 1 / (1 + portable.power(moved / (shared["keep"] * limits.l2), 4.0))
    gain = 1 + (shared["cache"] - 1) * kept
    rate = np.where(uneven > 0, fitted["rate_uneven"], fitted["rate"])
    cycles = limits.units * limits.clock
    rows = np.maximum(rows, 1.0)
    terms = (
        moved / (limits.stream * fitted["bandwidth"] * gain),
        n / (cycles * rate),
        rows * fitted["cycles_row"] / cycles,
        n / rows * fitted["cycles_lone"] / limits.clock,
    )
    p = shared["overlap"]
    busy = portable.power(sum(portable.power(term, p) for term in terms), 1 / p)
    out: Array = limits.floor * (shared["start"] + fitted["start"]) + busy
    return out


class Price(NamedTuple):
    """Seconds of each kernel and the spread of their logarithm."""

    seconds: Array
    sigma: Array


class Group(NamedTuple):
    """Kernels of one op and one format: the input of a formula."""

    limits: Limits
    constants: Constants
    op: str
    shape: dict[str, Array]
    flops: Array
    bytes: Array

    def column(self, key: str, otherwise: float | Array) -> Array:
        """A column of the shape with its gaps filled."""
        if key not in self.shape:
            return np.broadcast_to(np.asarray(otherwise, float), self.flops.shape)
        values = self.shape[key]
        return np.where(np.isnan(values), otherwise, values)

    def take(self, rows: npt.NDArray[np.bool_]) -> "Group":
        """Some of the kernels."""
        shape = {key: values[rows] for key, values in self.shape.items()}
        return self._replace(shape=shape, flops=self.flops[rows], bytes=self.bytes[rows])

    def knows(self, *keys: str) -> npt.NDArray[np.bool_]:
        """Rows that have all of some keys."""
        known = np.full(self.flops.shape, True)
        for key in keys:
            known &= ~np.isnan(self.shape[key]) if key in self.shape else False
        return known


def seconds(
    device: Device,
    op: str | Sequence[str],
    dtype: str | Sequence[str],
    shape: Shapes = None,
    flops: npt.ArrayLike | None = None,
    bytes: npt.ArrayLike | None = None,
    *,
    constants: Constants | None = None,
    burst: float = 0.0,
) -> Price:
    """Time of each kernel on one device; `op` and `dtype` may be one for all or one each.

    `burst` is for boards timed cold: seconds for which they may exceed their power.
    """
    constants = constants or shipped()
    length = length_of(op, dtype, shape, flops, bytes)
    asked = columns(shape or {}, length)
    work, moved = _filled(flops, length), _filled(bytes, length)
    out, sigma = np.empty(length), np.empty(length)
    for (name, kind), rows in groups_of(op, dtype, length):
        given = replace(limits(device, kind, constants.arch), burst=burst)
        part = {k: v[rows] for k, v in asked.items()}
        group = Group(given, constants, name, part, work[rows], moved[rows])
        known, took = _known(group), roofline(group)
        if known.any():
            rule = _RULES.get(class_of(name, constants), _memory_bound)
            took[known] = rule(group.take(known))()
        out[rows], sigma[rows] = took, _sigma(group, known)
        if device.timed is not None:
            took = device.timed.price(name, kind, part, moved[rows])
            out[rows] = np.where(np.isnan(took), out[rows], took)
            sigma[rows] = np.where(np.isnan(took), sigma[rows], device.timed.sigma)
    return Price(out, sigma)


def host_seconds(device: Device, op: str) -> float:
    """Time the host takes to dispatch one eager call; a captured graph pays `launch` alone."""
    name = class_of(op).removesuffix("_backward").removesuffix("_dgrad").removesuffix("_wgrad")
    return device.launch * _CALLS.get(name, _CALL)


def class_of(op: str, constants: Constants | None = None) -> str:
    """The class whose formula prices an op."""
    known = (constants or shipped()).memory
    if op in ("gemm", "conv", "conv_dgrad", "conv_wgrad", "attention") or op in known:
        return op
    return _CLASSES.get(op, "bare")


def length_of(*given: object) -> int:
    for value in given:
        if isinstance(value, Mapping):
            sizes = [np.size(v) for v in value.values()]
            if sizes:
                return max(sizes)
        elif value is not None and not isinstance(value, str):
            return np.size(value)  # type: ignore[arg-type]
    return 1


def _filled(values: npt.ArrayLike | None, length: int) -> Array:
    """Numbers of one length; what is zero or missing is unknown."""
    if values is None:
        return np.full(length, np.nan)
    given = np.broadcast_to(np.asarray(values, float), (length,))
    return np.where(given > 0, given, np.nan)


def groups_of(
    op: str | Sequence[str], dtype: str | Sequence[str], length: int
) -> list[tuple[tuple[str, str], npt.NDArray[np.intp]]]:
    if isinstance(op, str) and isinstance(dtype, str):
        return [((op, dtype), np.arange(length))]
    ops = np.broadcast_to(np.asarray(op, str), (length,))
    dtypes = np.broadcast_to(np.asarray(dtype, str), (length,))
    pairs, index = np.unique(np.stack([ops, dtypes]), axis=1, return_inverse=True)
    order = np.argsort(index, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(index.ravel()))[:-1])
    return [((str(o), str(d)), rows) for (o, d), rows in zip(pairs.T, parts, strict=True)]


def _known(group: Group) -> npt.NDArray[np.bool_]:
    """Rows whose shape the formula of the op knows enough of; the roofline prices the others."""
    name = class_of(group.op, group.constants)
    if name == "bare":
        return np.full(group.flops.shape, False)
    if name in _NEEDS:
        return group.knows(*_NEEDS[name])
    return ~np.isnan(group.bytes) | group.knows("n") | group.knows("rows", "cols")


def _sigma(group: Group, known: npt.NDArray[np.bool_]) -> Array:
    name = class_of(group.op, group.constants)
    table = group.constants.sigma
    row = table.get(f"{name}_{group.limits.pipe}") or table.get(name) or table["bare"]
    seen = group.limits.arch in group.constants.arch and group.limits.fitted["measured"] > 0
    bare = max(_BARE * row["unseen"], table["bare"]["unseen"])
    return np.where(known, row["seen" if seen else "unseen"], bare)


def _gemm(group: Group) -> Formula:
    given = group.limits
    b, m, n, k = (group.column(key, 1.0) for key in ("b", "m", "n", "k"))
    ta, tb = group.column("ta", 0.0), group.column("tb", 0.0)
    asked = gemm.product(b, m, n, k, ta, tb, given.size)
    fitted = group.constants.gemm[given.pipe]
    return partial(gemm.seconds, given, fitted, asked, _grouped(group, fitted))


def _grouped(group: Group, fitted: Mapping[str, float]) -> Array | float:
    """How many times as long as batched matmuls those of experts take (1), or their weights' (2).

    Rows of each expert are known on the device alone: one kernel walks over all experts.
    """
    if "grouped" not in group.shape or "grouped" not in fitted:
        return 1.0
    kind = group.column("grouped", 0.0)
    plain = fitted["grouped_fp8"] if group.limits.size < 2 else fitted["grouped"]
    weights = max(plain, fitted["grouped_wgrad"])
    return np.where(kind > 1, weights, np.where(kind > 0, plain, 1.0))


def _conv(group: Group) -> Formula:
    given = group.limits
    parts = group.constants
    fitted = parts.gemm[given.pipe], parts.conv[given.pipe]
    return partial(gemm.conv_seconds, given, *fitted, group.op, _asked(group))


def _asked(group: Group) -> gemm.Conv:
    """A convolution's columns; a third dimension is folded into the rows."""
    get = group.column
    stride, pad = get("stride", 1.0), get("pad", 0.0)
    h, w, r, s = (get(key, 1.0) for key in ("h", "w", "r", "s"))
    depth, deep = get("d", 1.0), get("t", 1.0)
    p = get("p", np.floor((h + 2 * pad - r) / stride) + 1)
    q = get("q", np.floor((w + 2 * pad - s) / stride) + 1)
    out = np.where(depth > 1, np.floor((depth + 2 * pad - deep) / stride) + 1, 1.0)
    flat = {"h": h * depth, "p": np.maximum(p * out, 1.0), "q": np.maximum(q, 1.0), "r": r * deep}
    return gemm.Conv(
        n=get("n", 1.0),
        c=get("c", 1.0),
        w=w,
        k=get("k", 1.0),
        s=s,
        stride=stride,
        groups=get("groups", 1.0),
        nhwc=get("nhwc", 0.0),
        **flat,
    )


def _attention(group: Group) -> Formula:
    get = group.column
    sizes = [get(key, 1.0) for key in ("b", "heads", "sq", "sk", "d")]
    flags = ("causal", "direction", "dropout", "window")
    asked = Attention(*sizes, *(get(k, 0.0) for k in flags))
    return partial(_fused_or_not, group, asked)


def _fused_or_not(group: Group, asked: Attention) -> Array:
    """Attention by the kernels that its device has."""
    get = group.column
    given, parts = group.limits, group.constants
    product = parts.gemm[given.pipe]
    out = attention_seconds(given, product, parts.attention[given.pipe], asked)
    older = (get("flash2", 0.0) > 0) & (given.pipe == "tensor") & (given.arch in _NEWER)
    if older.any():
        out = np.where(
            older, attention_seconds(given, product, parts.attention["flash2"], asked), out
        )
    if given.arch in _WITHOUT_FUSED_ATTENTION:
        return written_seconds(asked, given.size, given.fp32, given.bandwidth)
    apart = get("math", 0.0) > 0
    return np.where(apart, _unfused(group, asked), out) if apart.any() else out


class _Written(NamedTuple):
    """What attention costs written out: rates of a device, and what is moved."""

    products: float  # share of the fp32 peak
    score: float  # bytes a score
    dropped: float  # more of them with dropout
    number: float  # bytes a number of the queries
    seconds: float  # for all its kernels to begin and end


def written_seconds(a: Attention, item: float, fp32: float, bandwidth: float) -> Array:
    """Attention written out by PyTorch: matmuls in fp32, and passes over the scores."""
    known: dict[str, Any] = passes()["written"]
    there, back = (_Written(*cost) for cost in known["wide" if item > 2 else "half"])
    is_back, queries = a.backward > 0, a.b * a.heads * a.sq
    share, score, dropped, number, start = (
        np.where(is_back, *pair) for pair in zip(back, there, strict=True)
    )
    scores = queries * a.sk
    flops = np.where(is_back, 8.0, 4.0) * scores * a.d
    moved = (score + dropped * (a.dropout > 0)) * scores + number * queries * a.d
    out: Array = flops / (share * fp32) + moved / (float(known["stream"]) * bandwidth) + start
    return out


def _unfused(group: Group, a: Attention) -> Array:
    """Two matmuls and a softmax forward; twice the matmuls and its gradient backward."""
    given, parts = group.limits, group.constants
    zero, many = np.zeros(len(a.b)), a.b * a.heads
    scores = gemm.product(many, a.sq, a.sk, a.d, zero, zero + 1, given.size)
    values = gemm.product(many, a.sq, a.d, a.sk, zero, zero, given.size)
    fitted = parts.gemm[given.pipe]
    products = gemm.seconds(given, fitted, scores) + gemm.seconds(given, fitted, values)
    n = many * a.sq * a.sk
    back = a.backward > 0
    shared = parts.memory["all"]
    soft = [
        memory_bound_seconds(
            given, shared, parts.memory[name], passes * n * given.size, n, n / a.sk, zero
        )
        for name, passes in (("softmax", 2), ("softmax_backward", 3))
    ]
    return np.where(back, 2 * products + soft[1], products + soft[0])


def _memory_bound(group: Group) -> Formula:
    given, parts = group.limits, group.constants
    name = class_of(group.op, parts)
    half = f"{name}_half" if given.size < 4 else name  # libraries have other kernels for halves
    fitted = parts.memory.get(half, parts.memory[name])
    rows, cols = group.column("rows", np.nan), group.column("cols", np.nan)
    n = group.column("n", rows * cols)
    moved = np.where(np.isnan(group.bytes), fitted["passes"] * n * given.size, group.bytes)
    n = np.where(np.isnan(n), moved / (fitted["passes"] * given.size), n)
    cols = np.where(np.isnan(cols), np.minimum(n, 1024.0), cols)
    rows = np.where(np.isnan(rows), n / cols, rows)
    uneven = group.column("uneven", 0.0)
    shared = parts.memory["all"]
    return partial(memory_bound_seconds, given, shared, fitted, moved, n, rows, uneven)


def roofline(group: Group) -> Array:
    """Flop and bytes alone: the share of the peak grows with the work each unit has."""
    given, fitted = group.limits, group.constants.roofline[group.limits.pipe]
    work, moved = np.nan_to_num(group.flops), np.nan_to_num(group.bytes)
    each = work / given.units
    share = fitted["peak"] * each / (each + fitted["half_flops"])
    rate = given.peak * np.where(work > 0, np.minimum(share, 1.0), 1.0)
    compute = gemm.throttled(given, fitted, np.maximum(work, 1.0), rate)
    memory = moved / (given.stream * fitted["bandwidth"])
    return given.floor + gemm.norm(fitted["overlap"], compute, memory)


_RULES: dict[str, Callable[[Group], Formula]] = {
    "gemm": _gemm,
    "conv": _conv,
    "conv_dgrad": _conv,
    "conv_wgrad": _conv,
    "attention": _attention,
}
