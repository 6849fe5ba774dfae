"""One thing to measure: an operator, a direction, a number format, sizes, and its least work.

A case is plain text through and through (`linear forward bf16 nk m=4096;n=768;k=768`), so that
requests and results can be compared on another machine without torch.

Which sizes to measure: points that fill a box evenly in logarithms, snapped as models snap them.

    xᵢ = frac(½ + i·α),  αⱼ = φ_d^−(j+1),  φ_d the root of φ^(d+1) = φ + 1        (→ `fill`)

the additive recurrence of M. Roberts (“The unreasonable effectiveness of quasirandom sequences”,
2018): every prefix covers the box, without a table and the same on every machine. Most widths of
models are multiples of 64, some of 8, a few are odd (vocabularies, feature counts); `snap` keeps
that mixture, because matrix units need aligned rows.

The least a case must do: floating-point operations, and bytes each read or written once.

Work over the measured ceilings is a floor for the time (→ `floor`); it decides which cases fit a
device before they run, and afterwards what share of the ceiling each reached.

    linear, bmm   2·b·m·n·k flop; each operand once
    conv          2·n·k·p·q·(c/g)·r·s flop in every direction; image, filters and result once
    attention     4·b·h·s²·d forward, 10·b·h·s²·d backward (five matmuls for two), half if causal
    recurrent     2·s·b·n·2·gates·n a layer, twice that backward
    the rest      1 flop a byte: bytes are what counts, by tensors read and written (→ `_PASSES`)
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import prod
from typing import TypeVar

from foretell.errors import InputError
from foretell.spec import is_whole

T = TypeVar("T")
Range = tuple[float, float]
# Of 20 sizes: 11 multiples of 64, 5 of 8, 4 as they fall. The order spreads each over a prefix.
_STEPS = (64, 64, 8, 64, 1, 64, 8, 64, 64, 1, 64, 8, 64, 8, 64, 1, 64, 64, 8, 1)


Size = int | str
# Bytes of one element. `tf32` is fp32 in memory; fp32 means that tf32 is switched off.
SIZES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "bool": 1}
# Whole tensors an op reads and writes at its full size, forward and backward.
_PASSES = {
    "batch_norm": (3, 5), "layer_norm": (2, 4), "rms_norm": (2, 4), "group_norm": (3, 5),
    "softmax": (2, 3), "cross_entropy": (3, 3), "where": (2.25, 3), "masked_fill": (2.25, 3),
    "add": (3, 3), "sub": (3, 3), "mul": (3, 3), "div": (3, 3), "add_": (3, 3), "mul_": (3, 3),
    "addcmul_": (3, 3), "addcdiv_": (4, 4), "lerp_": (3, 3), "add_alpha_": (3, 3),
    "zero_": (1, 1), "fill_": (1, 1), "sum": (1, 1), "mean": (1, 1), "amax": (1, 1),
    "norm": (1, 1), "var": (1, 1), "argmax": (1, 1), "topk": (1, 1), "h2d": (1, 1), "d2h": (1, 1),
    "exp": (2, 3), "dropout": (2.25, 2.25),
}  # fmt: skip
# Elements an optimizer reads and writes for each parameter, with the best implementation.
_STATE = {"sgd": 3, "momentum": 5, "adam": 7, "adamw": 7, "adagrad": 5, "rmsprop": 5}


def fill(count: int, *ranges: Range) -> Iterator[tuple[float, ...]]:
    """`count` points, each size between the ends of its range, even in their logarithms."""
    alphas = _alphas(len(ranges))
    for i in range(1, count + 1):
        at = [(0.5 + i * alpha) % 1.0 for alpha in alphas]
        yield tuple(low * (high / low) ** x for x, (low, high) in zip(at, ranges, strict=True))


def wholes(count: int, *ranges: Range) -> Iterator[tuple[int, ...]]:
    """`fill` in whole numbers, snapped to the multiples that models use."""
    for i, point in enumerate(fill(count, *ranges)):
        yield tuple(snap(value, _STEPS[(i + 7 * j) % 20]) for j, value in enumerate(point))


def snap(value: float, step: int) -> int:
    """The nearest multiple of `step`; of a smaller power of two where the value is small."""
    while step > 1 and value < 2 * step:
        step //= 2
    return max(1, round(value / step) * step)


def one_of(options: Sequence[T], i: int) -> T:
    """The i-th turn through weighted options: repeat an option to make it come more often."""
    return options[int((0.5 + i * 0.6180339887498949) % 1.0 * len(options))]


def sizes(count: int, low: float, high: float) -> list[int]:
    """Element counts from low to high, even in logarithms and none a round power of two."""
    return [round(value) // 4 * 4 for (value,) in fill(count, (low, high))]


def dims(written: str) -> list[tuple[int, ...]]:
    """`64x112 128x56` → [(64, 112), (128, 56)]."""
    return [tuple(int(d) for d in each.split("x")) for each in written.split()]


@cache
def published(name: str) -> tuple[dict[str, str], ...]:
    """Rows of a table of layers of published architectures."""
    file = resources.files("foretell_lab.bench") / "published" / f"{name}.csv"
    with file.open(encoding="utf-8") as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        return tuple(dict(row) for row in rows)


def _alphas(dims: int) -> list[float]:
    root = 2.0
    for _ in range(60):
        root = (1 + root) ** (1 / (dims + 1))
    return [root ** -(j + 1) for j in range(dims)]


@dataclass(frozen=True)
class Case:
    """An operator call to measure; `shape` holds named sizes, in order."""

    op: str
    direction: str  # forward, backward; dgrad and wgrad where a backward has two parts; step
    dtype: str  # fp32, tf32, bf16, fp16; `fp32>bf16` for a cast; amp_bf16 for host costs
    layout: str  # memory layout of the operands, as the op names it; `-` where there is one way
    shape: tuple[tuple[str, Size], ...]

    def __getitem__(self, name: str) -> int:
        value = dict(self.shape).get(name)
        if not isinstance(value, int):
            raise InputError(f"case `{self}` has no size `{name}`")
        return value

    def word(self, name: str, default: str = "") -> str:
        """A size that is a word, or the default where it is not given."""
        return str(dict(self.shape).get(name, default))

    def size(self, name: str, default: int) -> int:
        """A size, or the default where it is not given."""
        return self[name] if name in dict(self.shape) else default

    @property
    def elements(self) -> int:
        """Bytes of one element; of the wider side of a cast."""
        return max(SIZES.get(part.removeprefix("amp_"), 4) for part in self.dtype.split(">"))

    def __str__(self) -> str:
        return " ".join((self.op, self.direction, self.dtype, self.layout, text(self.shape)))


def case(
    op: str, direction: str = "forward", dtype: str = "fp32", layout: str = "-", **shape: Size
) -> Case:
    """A case from named sizes."""
    return Case(op, direction, dtype, layout, tuple(shape.items()))


def text(shape: tuple[tuple[str, Size], ...]) -> str:
    """`m=4096;n=768`."""
    return ";".join(f"{name}={value}" for name, value in shape)


def read_shape(written: str) -> tuple[tuple[str, Size], ...]:
    """The sizes that `text` wrote."""
    parts = [part.partition("=") for part in written.split(";") if part]
    for name, equals, value in parts:
        if not (name and equals and value):
            raise InputError(
                f"`{written}` is no shape: `{name}{equals}{value}` is not `name=value`",
                hint="sizes read `m=4096;n=768;k=768`",
            )
    return tuple((name, int(value) if is_whole(value) else value) for name, _, value in parts)


def parse_case(written: str) -> Case:
    """The case that prints so."""
    parts = written.split()
    if len(parts) != 5:
        raise InputError(
            f"`{written}` is no case: {len(parts)} words where 5 are needed",
            hint="write `linear forward bf16 nk m=4096;n=768;k=768`",
        )
    op, direction, dtype, layout, shape = parts
    return Case(op, direction, dtype, layout, read_shape(shape))


def read_case(row: Mapping[str, str]) -> Case:
    """The case a row of a table speaks of."""
    return Case(row["op"], row["direction"], row["dtype"], row["layout"], read_shape(row["shape"]))


_STATE |= {"clip_grad_norm": 3, "unscale": 2, "zero_grad": 1}


@dataclass(frozen=True)
class Work:
    """Flop and bytes."""

    flops: float
    bytes: float


def work(case: Case) -> Work:
    """The least work of a case."""
    return _WORK.get(case.op, _stream)(case)


def floor(case: Case, rates: dict[str, float]) -> float:
    """Seconds the case takes at least, at measured rates by format and `bytes`."""
    least = work(case)
    return max(least.flops / rates.get(case.dtype, rates["fp32"]), least.bytes / rates["bytes"])


def held(case: Case) -> float:
    """Bytes of memory to reserve while it runs, workspace allowed for."""
    return 3 * work(case).bytes


def _linear(case: Case) -> Work:
    b, m, n, k = case.size("b", 1), case["m"], case["n"], case["k"]
    return Work(2.0 * b * m * n * k, float(b * (m * k + k * n + m * n) * case.elements))


def _conv(case: Case) -> Work:
    n, c, k, groups = case["n"], case["c"], case["k"], case["groups"]
    filters = case["r"] * case["s"] * (case["s"] if case.op == "conv3d" else 1)
    pixels = case["h"] * case["w"] * case.size("t", 1)
    steps = case["stride"] ** (1 if case["h"] == 1 else 2)
    out = pixels * steps if case.op == "convt2d" else max(1, pixels // steps)
    products = pixels if case.op == "convt2d" else out
    flops = 2.0 * n * k * products * c / groups * filters
    moved = n * c * pixels + n * k * out + k * c * filters // groups
    return Work(flops, float(moved * case.elements))


def _attention(case: Case) -> Work:
    b, h, s, d = (case[name] for name in "bhsd")
    back = case.direction == "backward"
    flops = (10.0 if back else 4.0) * b * h * s * s * d / (2 if case["causal"] else 1)
    return Work(flops, float((8 if back else 4) * b * h * s * d * case.elements))


def _recurrent(case: Case) -> Work:
    s, b, n, layers = case["s"], case["b"], case["n"], case["layers"]
    gates, back = (4 if case.op == "lstm" else 3), (2 if case.direction == "backward" else 1)
    weights = 2 * gates * n * n * layers
    return Work(
        2.0 * s * b * weights * back, float((weights + 4 * s * b * n) * case.elements * back)
    )


def _lookup(case: Case) -> Work:
    picked = case["m"] * case["n"] * case.size("bag", 1)
    table = case["rows"] * case["n"] if case.direction == "backward" else 0
    moved = (2 * picked + table) * case.elements + 8 * case["m"] * case.size("bag", 1)
    return Work(float(picked), float(moved))


def _indexed(case: Case) -> Work:
    picked = case["rows"] * case["n"]
    return Work(float(picked), float(picked * case.elements * 3))


def _step(case: Case) -> Work:
    if case.layout == "none":
        return Work(0.0, 0.0)
    moved = _STATE[case.op] * case["total"] * case.elements
    return Work(float(moved), float(moved))


def _pool(case: Case) -> Work:
    image = case["n"] * case["c"] * case["h"] * case["w"]
    out = image * case.size("times", 1) ** 2 // case.size("stride", 1) ** 2
    if "out" in dict(case.shape):
        out = case["n"] * case["c"] * case["out"] ** 2
    index = 8 * out if case.op == "max_pool" else 0
    return Work(float(image), float((image + out) * case.elements + index))


def _stream(case: Case) -> Work:
    elements = prod(v for k, v in case.shape if isinstance(v, int) and k not in ("groups", "rows"))
    passes = _PASSES.get(case.op, (2, 3))[case.direction == "backward"]
    each = sum(SIZES[d] for d in case.dtype.split(">")) / 2 if ">" in case.dtype else case.elements
    moved = float(elements * passes * each)
    return Work(moved, moved)


_WORK: dict[str, Callable[[Case], Work]] = {
    "linear": _linear, "bmm": _linear, "conv2d": _conv, "conv3d": _conv, "convt2d": _conv,
    "attention": _attention, "lstm": _recurrent, "gru": _recurrent,
    "embedding": _lookup, "embedding_bag": _lookup,
    **dict.fromkeys(("index_select", "gather", "index_put", "scatter_add"), _indexed),
    **dict.fromkeys(_STATE, _step),
    **dict.fromkeys(("max_pool", "avg_pool", "adaptive_pool", "nearest", "bilinear"), _pool),
}  # fmt: skip
