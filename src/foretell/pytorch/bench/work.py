"""The least a case must do: floating-point operations, and bytes each read or written once.

Work over the measured ceilings is a floor for the time (→ `floor`); it decides which cases fit a
device before they run, and afterwards what share of the ceiling each reached.

    linear, bmm   2·b·m·n·k flop; each operand once
    conv          2·n·k·p·q·(c/g)·r·s flop in every direction; image, filters and result once
    attention     4·b·h·s²·d forward, 10·b·h·s²·d backward (five matmuls for two), half if causal
    recurrent     2·s·b·n·2·gates·n a layer, twice that backward
    the rest      1 flop a byte: bytes are what counts, by tensors read and written (→ `_PASSES`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from foretell.pytorch.bench.case import SIZES, Case

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
_STATE |= {"clip_grad_norm": 3, "unscale": 2, "zero_grad": 1}


@dataclass(frozen=True)
class Work:
    """Flop and bytes."""

    flops: float
    bytes: float


def work(asked: Case) -> Work:
    """The least work of a case."""
    return _WORK.get(asked.op, _stream)(asked)


def floor(asked: Case, rates: dict[str, float]) -> float:
    """Seconds the case takes at least, at measured rates by format and `bytes`."""
    least = work(asked)
    return max(least.flops / rates.get(asked.dtype, rates["fp32"]), least.bytes / rates["bytes"])


def held(asked: Case) -> float:
    """Bytes of memory to reserve while it runs, workspace allowed for."""
    return 3 * work(asked).bytes


def _linear(asked: Case) -> Work:
    b, m, n, k = asked.size("b", 1), asked["m"], asked["n"], asked["k"]
    return Work(2.0 * b * m * n * k, float(b * (m * k + k * n + m * n) * asked.elements))


def _conv(asked: Case) -> Work:
    n, c, k, groups = asked["n"], asked["c"], asked["k"], asked["groups"]
    filters = asked["r"] * asked["s"] * (asked["s"] if asked.op == "conv3d" else 1)
    pixels = asked["h"] * asked["w"] * asked.size("t", 1)
    steps = asked["stride"] ** (1 if asked["h"] == 1 else 2)
    out = pixels * steps if asked.op == "convt2d" else max(1, pixels // steps)
    products = pixels if asked.op == "convt2d" else out
    flops = 2.0 * n * k * products * c / groups * filters
    moved = n * c * pixels + n * k * out + k * c * filters // groups
    return Work(flops, float(moved * asked.elements))


def _attention(asked: Case) -> Work:
    b, h, s, d = (asked[name] for name in "bhsd")
    back = asked.direction == "backward"
    flops = (10.0 if back else 4.0) * b * h * s * s * d / (2 if asked["causal"] else 1)
    return Work(flops, float((8 if back else 4) * b * h * s * d * asked.elements))


def _recurrent(asked: Case) -> Work:
    s, b, n, layers = asked["s"], asked["b"], asked["n"], asked["layers"]
    gates, back = (4 if asked.op == "lstm" else 3), (2 if asked.direction == "backward" else 1)
    weights = 2 * gates * n * n * layers
    return Work(
        2.0 * s * b * weights * back, float((weights + 4 * s * b * n) * asked.elements * back)
    )


def _lookup(asked: Case) -> Work:
    picked = asked["m"] * asked["n"] * asked.size("bag", 1)
    table = asked["rows"] * asked["n"] if asked.direction == "backward" else 0
    moved = (2 * picked + table) * asked.elements + 8 * asked["m"] * asked.size("bag", 1)
    return Work(float(picked), float(moved))


def _indexed(asked: Case) -> Work:
    picked = asked["rows"] * asked["n"]
    return Work(float(picked), float(picked * asked.elements * 3))


def _step(asked: Case) -> Work:
    if asked.layout == "none":
        return Work(0.0, 0.0)
    moved = _STATE[asked.op] * asked["total"] * asked.elements
    return Work(float(moved), float(moved))


def _pool(asked: Case) -> Work:
    image = asked["n"] * asked["c"] * asked["h"] * asked["w"]
    out = image * asked.size("times", 1) ** 2 // asked.size("stride", 1) ** 2
    if "out" in dict(asked.shape):
        out = asked["n"] * asked["c"] * asked["out"] ** 2
    index = 8 * out if asked.op == "max_pool" else 0
    return Work(float(image), float((image + out) * asked.elements + index))


def _stream(asked: Case) -> Work:
    elements = prod(v for k, v in asked.shape if isinstance(v, int) and k not in ("groups", "rows"))
    passes = _PASSES.get(asked.op, (2, 3))[asked.direction == "backward"]
    each = (
        sum(SIZES[d] for d in asked.dtype.split(">")) / 2 if ">" in asked.dtype else asked.elements
    )
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
