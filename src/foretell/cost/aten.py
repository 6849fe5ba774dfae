"""An aten call as the kernels that a price is known for.

Traces and captured graphs name operators as PyTorch called them: the op is `addmm`, the shape its
inputs. Prices know classes of kernels (→ `foretell.cost.kernel`); `kernels` turns one into the
other, and what it has no rule for is priced by its flop and bytes. A call as text:

    in=768+4096x768+768x3072,types=float+float+float,args=-+-+-,strides=-+-+1x768,part=dgrad

Inputs are joined by `+`, dims by `x`; `-` is none. `strides` is there only where an input does not
lie in memory row by row, `part` only where a task is one of several kernels of its operator.
Bytes are counted as where the formulas were fitted: a norm reads and writes once, its gradient
touches five tensors, and so on (→ `foretell_lab.validate.kernel_traces`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from foretell.cost.kernel import added_rows
from foretell.cost.kernel import write_shape as write
from foretell.operators import BYTES, rules, window
from foretell.spec import is_whole

_MOST = 1 << 62  # elements; more are no tensor

Dims = tuple[int, ...]
Sizes = dict[str, float]


@dataclass(frozen=True)
class Kernel:
    """A kernel that can be priced: its class, its shape as text, and what it moves and computes."""

    op: str
    shape: str = ""
    bytes: float = 0.0
    flops: float = 0.0
    times: float = 1.0  # how many of them in a row


@dataclass(frozen=True)
class Call:
    """A called operator; inputs that are no tensors have no dims."""

    op: str
    dims: tuple[Dims, ...]
    types: tuple[str, ...]
    values: tuple[str, ...]
    strides: tuple[Dims, ...]
    part: str
    lists: tuple[tuple[Dims, ...], ...]  # of inputs that are lists of tensors
    moved: float  # bytes, where the task's author counted them
    flops: float

    def size(self, i: int) -> int:
        """Elements of an input."""
        return min(math.prod(self.dims[i]), _MOST) if i < len(self.dims) else 0

    def item(self, i: int = 0) -> int:
        """Bytes of one element of an input."""
        return BYTES.get(self.types[i], 4) if i < len(self.types) else 4

    def numbers(self, i: int) -> tuple[int, ...]:
        """A value that is whole numbers: `2x2` → (2, 2)."""
        text = self.values[i] if i < len(self.values) else ""
        return tuple(int(part) for part in text.split("x") if is_whole(part))

    def stride(self, i: int) -> Dims:
        """The strides of an input; contiguous where none are recorded."""
        recorded = self.strides[i] if i < len(self.strides) else ()
        return recorded or in_order(self.dims[i])

    def tensors(self) -> list[int]:
        """Which inputs are tensors with elements."""
        return [i for i, d in enumerate(self.dims) if d and 0 not in d]

    def input_bytes(self) -> float:
        """Bytes of all tensor inputs."""
        return float(sum(self.size(i) * self.item(i) for i in self.tensors()))


@lru_cache(8192)  # a step has the same few calls many times
def read(op: str, shape: str, moved: float = 0.0, flops: float = 0.0) -> Call:
    """A call from its text."""
    parts = dict(item.partition("=")[::2] for item in shape.split(","))
    texts = {key: parts.get(key, "").split("+") for key in ("in", "types", "args", "strides")}
    dims = tuple(_dims(text) for text in texts["in"])
    strides = tuple(_dims(text) for text in texts["strides"])
    lists = tuple(_each_dims(text) for text in texts["in"])
    return Call(
        op, dims, tuple(texts["types"]), tuple(texts["args"]), strides, parts.get("part", ""),
        lists, moved, flops,
    )  # fmt: skip


def _each_dims(text: str) -> tuple[Dims, ...]:
    return tuple(map(_dims, text.split("|"))) if "|" in text else ()


def _dims(text: str) -> Dims:
    if not text or text == "-" or "|" in text:
        return ()
    return tuple(min(int(d[:20]), _MOST) for d in text.split("x") if d.isdecimal())


def in_order(dims: Dims) -> Dims:
    strides, step = [], 1
    for size in reversed(dims):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _transposed(call: Call, i: int) -> float:
    """Whether the second-last dimension is the contiguous one."""
    dims, strides = call.dims[i], call.stride(i)
    return float(strides[-2] == 1 and dims[-1] > 1 and strides[-1] != 1)


def _product(first: int) -> Callable[[Call], list[Kernel]]:
    """A (batched) matmul of two inputs that stand one behind the other."""

    def rule(call: Call) -> list[Kernel]:
        a, b = call.dims[first], call.dims[first + 1]
        shape: Sizes = {"b": a[0] if len(a) == 3 else 1, "m": a[-2], "n": b[-1], "k": a[-1]}
        shape |= {"ta": _transposed(call, first), "tb": _transposed(call, first + 1)}
        return [Kernel("gemm", write(shape))]

    return rule


def _grouped(call: Call) -> list[Kernel]:
    """A product for each group: rows, columns or the shared side are cut into even parts."""
    a, b = call.dims[0], call.dims[1]
    groups = next((d[0] for d in (a, b) if len(d) == 3), call.dims[2][0] if call.dims[2] else 1)
    shape: Sizes = {"b": groups, "m": a[-2], "n": b[-1], "k": a[-1]}
    cut = {(2, 3): "m", (3, 2): "n", (2, 2): "k"}.get((len(a), len(b)))
    if cut:
        shape[cut] = max(shape[cut] / groups, 1.0)
    shape |= {"ta": _transposed(call, 0), "tb": _transposed(call, 1)}
    return [Kernel("gemm", write(shape))]


def _pair(numbers: tuple[int, ...]) -> int:
    return numbers[-1] if numbers else 1


def _image(x: Dims, w: Dims, stride: int, pad: int, groups: int, dilation: int = 1) -> Sizes:
    """A convolution's sizes; one of one dimension is an image of one row."""
    keys = ("n", "c", "h", "w", "k", "r", "s", "stride", "pad", "groups")
    sides, taps = (1,) * (4 - len(x)) + x[2:], (1,) * (4 - len(w)) + w[2:]
    found = (x[0], x[1], *sides[-2:], w[0], *taps[-2:], stride, pad, groups)
    sizes: Sizes = dict(zip(keys, found, strict=True))
    # A row has no rows above and below it to be padded with.
    is_row = len(x) == 3 or (len(x) == 4 and sides[-2] == taps[-2] == 1)
    if is_row or dilation > 1:
        tall, wide = (
            max((s + 2 * pad - dilation * (r - 1) - 1) // stride + 1, 1)
            for s, r in zip(sides[-2:], taps[-2:], strict=True)
        )
        sizes |= {"p": 1 if is_row else tall, "q": wide}
    return sizes | ({"d": sides[0], "t": taps[0]} if len(sides) == 3 else {})


def _conv_shape(call: Call, x: int, at: int) -> tuple[str, bool]:
    """The shape of a convolution of input `x`, whose options begin at `at`; and if transposed."""
    dims, weight = call.dims[x], call.dims[x + 1]
    if is_cudnn_order(call) and x == 0:
        turned = is_cudnn_transposed(call)
        pad, stride, dilation, groups = (
            _pair(call.numbers(i + turned * (i > 2))) for i in (2, 3, 4, 5)
        )
    else:
        stride, pad, dilation = (_pair(call.numbers(at + i)) for i in range(3))
        groups = _pair(call.numbers(at + 5))
        turned = call.values[at + 3] in ("True", "1")
    if turned:  # the gradient of the convolution that goes the other way
        grown = [
            1 if s == r == 1 else max((s - 1) * stride - 2 * pad + dilation * (r - 1) + 1, 1)
            for s, r in zip(dims[2:], weight[2:], strict=True)
        ]
        dims = (dims[0], weight[1] * groups, *grown)
    shape = _image(dims, weight, stride, pad, groups, dilation)
    if _is_channels_last(call, x):
        shape["nhwc"] = 1
    return write(shape), turned


def is_cudnn_order(call: Call) -> bool:
    """Whether a forward has the options of `cudnn_convolution`: padding, stride, dilation, groups.

    `convolution` has a bias where that has its padding, then stride, padding, dilation, transposed.
    """
    return len(call.dims) > 2 and not call.dims[2] and bool(call.numbers(2))


def is_cudnn_transposed(call: Call) -> bool:
    """Whether cuDNN's options are those of a transposed one: it pads what it is given and makes.

    A depthwise one has its window where those have their padding, and a bias behind it.
    """
    return is_cudnn_order(call) and call.types[3:6] == ("ScalarList",) * 3


def _is_channels_last(call: Call, i: int) -> bool:
    strides = call.stride(i)
    return len(strides) == 4 and strides[1] == 1 and call.dims[i][1] > 1


def _conv(call: Call) -> list[Kernel]:
    shape, turned = _conv_shape(call, 0, 3)
    main = Kernel("conv_dgrad" if turned else "conv", shape)
    bias = Kernel("elementwise", write({"uneven": 1}), 2.0 * _conv_out(call) * call.item())
    has_bias = bool(call.dims[2])
    parts = {"conv": [main], "bias": [bias]}
    return parts.get(call.part, [main, bias] if has_bias else [main])


def _conv_out(call: Call) -> float:
    """Elements a convolution makes."""
    x, w = call.dims[0], call.dims[1]
    cudnn, turned = is_cudnn_order(call), is_cudnn_transposed(call)
    places = (4, 2, 5) if turned else (3, 2, 4) if cudnn else (3, 4, 5)
    stride, pad, dilation = (call.numbers(i) or (1,) for i in places)
    turned = turned or (not cudnn and call.values[6] in ("True", "1"))
    sides = window(x[2:], w[2:], stride, pad, dilation, turned=turned)
    groups = _pair(call.numbers(6 if cudnn else 8))
    return float(x[0] * (w[1] * groups if turned else w[0]) * math.prod(sides))


def _conv_backward(call: Call) -> list[Kernel]:
    shape, turned = _conv_shape(call, 1, 4)
    n = call.size(0)
    bias = Kernel("reduce", write({"n": n, "rows": call.dims[0][1]}), float(n * call.item()))
    parts = {
        "dgrad": Kernel("conv" if turned else "conv_dgrad", shape),
        "wgrad": Kernel("conv_wgrad", shape),
        "bias": bias,
    }
    if call.part:
        return [parts[call.part]]
    wanted = [word in ("True", "1") for word in call.values[-1].split("x")]
    return [k for k, is_in in zip(parts.values(), wanted, strict=False) if is_in]


def _each(op: str, written: float, place: str = "") -> Callable[[Call], list[Kernel]]:
    """An op over elements that writes `written` tensors like its largest input."""
    in_place = place == "in_place"

    def rule(call: Call) -> list[Kernel]:
        there = call.tensors()
        n = max((call.size(i) for i in there), default=0)
        item = call.item(there[0]) if in_place and there else _widest(call, there)
        moved = call.input_bytes() + written * n * item
        uneven = any(call.size(i) != n for i in there) or not _is_aligned(call, there)
        return [Kernel(op, write({"n": n, "uneven": uneven}), moved)] if n else []

    return rule


def _widest(call: Call, there: list[int]) -> int:
    return max((call.item(i) for i in there), default=4)


def _is_aligned(call: Call, there: list[int]) -> bool:
    """Whether all tensors are walked in the same order and no format is widened."""
    widens = len(there) > 1 and call.item(there[0]) > call.item(there[-1])
    return len({call.stride(i) for i in there}) <= 1 and not widens


def _copy(call: Call) -> list[Kernel]:
    """A copy reads one format and writes another; the task's bytes say both."""
    there = call.tensors()
    n = max((call.size(i) for i in there), default=0)
    alone = len(there) == 1 and "contiguous" in call.values[-1]  # a copy that puts rows in order
    uneven = not _is_aligned(call, there) or (alone and call.stride(0) != in_order(call.dims[0]))
    moved = call.moved or call.input_bytes()
    return [Kernel("copy", write({"n": n, "uneven": uneven}), moved)] if n else []


def _roll(call: Call) -> list[Kernel]:
    """One pass a dimension."""
    n = call.size(0)
    once = Kernel("copy", write({"n": n, "uneven": 1}), 2.0 * n * call.item())
    return [once] * max(1, len(call.numbers(1))) if n else []


def _reduce(call: Call) -> list[Kernel]:
    dims = call.dims[0]
    gone = {i % len(dims) for i in call.numbers(1)} if dims else set()
    rows = math.prod(d for i, d in enumerate(dims) if i not in gone) if gone else 1
    n = call.size(0)
    return [Kernel("reduce", write({"n": n, "rows": rows}), float(n * call.item()))] if n else []


def _by_row(op: str, passes: float) -> Callable[[Call], list[Kernel]]:
    """An op along the last dimension that touches `passes` tensors like its first input."""

    def rule(call: Call) -> list[Kernel]:
        n, cols = call.size(0), call.dims[0][-1]
        shape = {"n": n, "rows": n / cols, "cols": cols}
        return [Kernel(op, write(shape), passes * n * call.item())]

    return rule


def _by_channel(op: str, passes: float) -> Callable[[Call], list[Kernel]]:
    """Statistics over every dimension but the second.

    Channels last, cuDNN streams at the memory's pace (batch_norm nhwc rows of
    `tables/measured/h200.csv.gz`); bf16 goes to PyTorch's own kernels instead.
    """

    def rule(call: Call) -> list[Kernel]:
        n, channels = call.size(0), call.dims[0][1]
        if _is_channels_last(call, 0) and call.types[0] != "c10::BFloat16":
            return [Kernel("elementwise", write({"n": n}), passes * n * call.item())]
        shape = {"n": n, "rows": channels, "cols": n / channels}
        return [Kernel(op, write(shape), passes * n * call.item())]

    return rule


def _by_group(op: str, passes: float, at: int) -> Callable[[Call], list[Kernel]]:
    """Statistics over a group of channels; how many samples and groups there are begins at `at`."""

    def rule(call: Call) -> list[Kernel]:
        n, rows = call.size(0), _pair(call.numbers(at)) * _pair(call.numbers(at + 3))
        shape = {"n": n, "rows": rows, "cols": n / rows}
        return [Kernel(op, write(shape), passes * n * call.item())]

    return rule


def _looked_up(call: Call) -> list[Kernel]:
    """Rows read from a table and written, one an index."""
    rows, width = call.size(1), math.prod(call.dims[0][1:])
    n = rows * width
    moved = call.moved or 2.0 * n * call.item()
    return [Kernel("embedding", write({"n": n, "rows": rows}), moved)] if n else []


def _embedding_backward(call: Call) -> list[Kernel]:
    """The gradient of every row that was looked up, and a table of zeros to add them to."""
    width, n = call.dims[0][-1], call.size(0)
    table = _pair(call.numbers(2))
    moved = (2 * n + table * width) * call.item()
    rows = float(added_rows(n / width, table)) if table else n / width
    return [Kernel("embedding_backward", write({"n": n, "rows": rows}), float(moved))]


def _pool(op: str, at: int) -> Callable[[Call], list[Kernel]]:
    def rule(call: Call) -> list[Kernel]:
        n = float(call.size(at))
        return [Kernel(op, write({"n": n}), 1.25 * n * call.item() + 2 * n)]

    return rule


def _attention(
    first: int, seq: int, head: int, mask: int, dropout: int
) -> Callable[[Call], list[Kernel]]:
    """Fused attention; queries, keys and values begin at input `first` (1 behind a gradient)."""

    def rule(call: Call) -> list[Kernel]:
        q, k = call.dims[first], call.dims[first + 1]
        shape: Sizes = {"b": q[0], "heads": q[head], "sq": q[seq], "sk": k[seq], "d": q[-1]}
        shape["causal"] = float(call.values[mask] in ("1", "True"))
        shape["dropout"] = float(float(call.values[dropout].replace("-", "0")) > 0)
        return [Kernel("attention", write({**shape, "direction": float(first > 0)}))]

    return rule


def _recurrent(call: Call) -> list[Kernel]:
    """Products of a recurrent layer: inputs of all steps at once, the state step by step.

    Backward has both gradients of each; those of the weights take all steps at once.
    """
    batch = call.dims[4][1]
    tokens = call.size(0) // call.dims[0][-1]
    steps = max(tokens // batch, 1)
    found: list[Kernel] = []
    for i, (n, k) in enumerate(d for d in call.lists[1] if len(d) == 2):
        rows, times = (tokens, 1) if i % 2 == 0 else (batch, steps)
        back = call.op.endswith("_backward")
        sizes = {"m": rows, "n": k, "k": n} if back else {"m": rows, "n": n, "k": k, "tb": 1}
        found.append(Kernel("gemm", write(sizes), times=times))
        if back:
            found.append(Kernel("gemm", write({"m": n, "n": k, "k": tokens, "ta": 1})))
        if times > 1:  # the gates of each step
            found.append(Kernel("elementwise", "", 2.0 * batch * n * call.item(), times=times))
    return found


def _optimizer(call: Call) -> list[Kernel]:
    """One kernel over a list of tensors."""
    return [Kernel("optimizer", "", call.moved)] if call.moved else []


RULES: dict[str, Callable[[Call], list[Kernel]]] = rules("kernel", globals(), "_")


@lru_cache(maxsize=1 << 16)
def kernels(op: str, shape: str, moved: float = 0.0, flops: float = 0.0) -> tuple[Kernel, ...]:
    """The kernels behind one task; one of flop and bytes alone where no rule knows the operator."""
    call = read(op, shape, moved, flops)
    rule = RULES.get(op)
    try:
        found = rule(call) if rule else []
    except (IndexError, ValueError):  # inputs another version of the operator does not have
        found = []
    return tuple(found) or (_plain(call),)


def _plain(call: Call) -> Kernel:
    """An operator without a rule: memory-bound unless its flop say otherwise."""
    moved = call.moved or call.input_bytes()
    if call.flops > 16 * moved:  # no pointwise function of PyTorch takes more flop a byte
        return Kernel("bare", "", moved, call.flops)
    return Kernel("elementwise", "", max(moved, 1.0), call.flops)
