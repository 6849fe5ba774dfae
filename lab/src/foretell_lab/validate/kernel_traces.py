"""Kernels of profiler traces as columns: what an op was asked, and how long its kernels ran.

A kernel belongs to the innermost op that was open on the launching thread. An op that runs several
kernels counts their sum; an op asked the same thing many times counts its median. Only traces that
recorded input shapes give anything.
"""

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretell_lab.validate.kernel_truth import Measured

_DTYPES = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16", "double": "fp64"}
_BYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "long int": 8, "int": 4}
_BYTES |= {"bool": 1, "unsigned char": 1}

Kernel = tuple[str, dict[str, float], float]  # op, shape, bytes (nan where the shape says it)


@dataclass(frozen=True)
class Call:
    """One op as the framework was asked for it."""

    name: str
    dims: tuple[Any, ...]
    strides: tuple[Any, ...]
    types: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def dtype(self) -> str:
        return _DTYPES.get(self.types[0], "") if self.types else ""

    def elements(self, i: int) -> int:
        return math.prod(self.dims[i]) if self.dims[i] else 1

    def tensor_bytes(self) -> float:
        """Bytes of all tensor inputs."""
        sizes = [
            math.prod(d) * _BYTES.get(t, 0)
            for d, t in zip(self.dims, self.types, strict=False)
            if d and all(isinstance(x, int) for x in d)
        ]
        return float(sum(sizes))


def read(folder: Path) -> list[Measured]:
    """Every op we have a kernel model for, in every trace of a folder."""
    rows: dict[tuple[str, str, str], list[tuple[list[Kernel], float]]] = defaultdict(list)
    for path in sorted(folder.glob("*.json.gz")):
        with gzip.open(path) as file:
            trace = json.load(file)
        device = next((d["name"] for d in trace.get("deviceProperties", [])), "")
        for call, seconds in _medians(trace["traceEvents"]):
            kernels = _kernels(call)
            if kernels and call.dtype:
                rows[device, kernels[-1][0], call.dtype].append((kernels, seconds))
    return [_columns(*key, found) for key, found in sorted(rows.items())]


def _medians(events: list[dict[str, Any]]) -> Iterator[tuple[Call, float]]:
    sums: dict[int, list[Any]] = {}
    owners = _owners(events)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            owner = owners.get(event["args"].get("correlation"))
            if owner is not None:
                sums.setdefault(id(owner), [owner, 0.0])[1] += event["dur"] * 1e-6
    times: dict[str, list[Any]] = {}
    for owner, seconds in sums.values():
        key = (
            owner["name"]
            + json.dumps(owner["args"].get("Input Dims"))
            + str(owner["args"].get("Input type"))
        )
        key += str(owner["args"].get("Concrete Inputs")) + str(owner["args"].get("Input Strides"))
        times.setdefault(key, [owner, []])[1].append(seconds)
    for owner, found in times.values():
        if owner["args"].get("Input Dims"):
            yield _call(owner), float(np.median(found))


def _call(owner: dict[str, Any]) -> Call:
    args = owner["args"]
    keys = ("Input Dims", "Input Strides", "Input type", "Concrete Inputs")
    return Call(owner["name"], *(tuple(args.get(k, ())) for k in keys))


def _owners(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Correlation id → the innermost op open on the thread that launched it."""
    ops: dict[int, list[dict[str, Any]]] = defaultdict(list)
    launches: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            ops[event["tid"]].append(event)
        elif event.get("cat") in ("cuda_runtime", "cuda_driver"):
            launches[event["tid"]].append(event)
    owners = {}
    for thread, found in launches.items():
        waiting = sorted(ops[thread], key=lambda e: (e["ts"], -e["dur"]), reverse=True)
        open_ops: list[dict[str, Any]] = []
        for launch in sorted(found, key=lambda e: e["ts"]):
            while waiting and waiting[-1]["ts"] <= launch["ts"]:
                op = waiting.pop()
                _close(open_ops, op["ts"])
                open_ops.append(op)
            _close(open_ops, launch["ts"])
            if open_ops:
                owners[launch["args"].get("correlation", -1)] = open_ops[-1]
    return owners


def _close(open_ops: list[dict[str, Any]], now: float) -> None:
    while open_ops and open_ops[-1]["ts"] + open_ops[-1]["dur"] < now:
        open_ops.pop()


def _columns(device: str, op: str, dtype: str, found: list[tuple[list[Kernel], float]]) -> Measured:
    kernels = [k for ks, _ in found for k in ks]
    reading = np.repeat(np.arange(len(found)), [len(ks) for ks, _ in found])
    keys = sorted({key for _, shape, _ in kernels for key in shape})
    shape = {key: np.array([s.get(key, np.nan) for _, s, _ in kernels]) for key in keys}
    moved = np.array([b for _, _, b in kernels])
    ops = np.array([o for o, _, _ in kernels])
    return Measured(
        "trace", device, op, dtype, "", shape, moved, reading, np.array([s for _, s in found]), ops
    )


def _kernels(call: Call) -> list[Kernel]:
    reader = _READERS.get(call.name)
    return reader(call) if reader and call.dims and call.dims[0] else []


def _transposed(dims: list[int], strides: list[int]) -> float:
    """Whether the second-last dimension is the contiguous one."""
    return float(strides[-2] == 1 and dims[-1] > 1 and strides[-1] != 1)


def _product(first: int) -> Callable[[Call], list[Kernel]]:
    def read_product(call: Call) -> list[Kernel]:
        a, b = call.dims[first], call.dims[first + 1]
        shape = {"b": float(a[0]) if len(a) == 3 else 1.0, "m": a[-2], "n": b[-1], "k": a[-1]}
        shape["ta"] = _transposed(a, call.strides[first])
        shape["tb"] = _transposed(b, call.strides[first + 1])
        return [("gemm", shape, np.nan)]

    return read_product


IMAGE = 4  # dims of samples of two-dimensional convolutions: the formulas know no others by shape


def _conv_shape(x: list[int], w: list[int], stride: str, pad: str, groups: int) -> dict[str, float]:
    keys = ("n", "c", "h", "w", "k", "r", "s", "stride", "pad", "groups")
    strides, pads = json.loads(stride), json.loads(pad)
    return dict(zip(keys, (*x, w[0], *w[2:], strides[0], pads[0], groups), strict=True))


def _conv(call: Call) -> list[Kernel]:
    x, w = call.dims[:2]
    if len(x) != IMAGE:
        return []
    pad, stride = call.values[2:4]
    return [("conv", _conv_shape(x, w, stride, pad, x[1] // w[1]), np.nan)]


def _depthwise(call: Call) -> list[Kernel]:
    x, w = call.dims[:2]
    if len(x) != IMAGE:
        return []
    stride, pad = call.values[4:6]
    return [("conv", _conv_shape(x, w, stride, pad, x[1] // w[1]), np.nan)]


def _conv_backward(call: Call) -> list[Kernel]:
    dy, x, w = call.dims[:3]
    if len(x) != IMAGE:
        return []
    stride, pad = call.values[4:6]
    shape = _conv_shape(x, w, stride, pad, x[1] // w[1])
    wanted = json.loads(call.values[-1].lower())
    kernels: list[Kernel] = []
    if wanted[2]:
        moved = math.prod(dy) * _BYTES[call.types[0]]
        kernels.append(("reduce", {"n": float(math.prod(dy)), "rows": float(dy[1])}, moved))
    if wanted[1]:
        kernels.append(("conv_wgrad", shape, np.nan))
    if wanted[0]:
        kernels.append(("conv_dgrad", shape, np.nan))
    return kernels


def _aligned(call: Call) -> bool:
    """Whether all full tensors are walked in the same order and widen no format."""
    full = [(s, t) for d, s, t in zip(call.dims, call.strides, call.types, strict=False) if d and s]
    if not full:
        return True
    widens = len(full) > 1 and _BYTES.get(full[0][1], 0) > _BYTES.get(full[-1][1], 0)
    return len({tuple(s) for s, _ in full}) == 1 and not widens


def _each(op: str, written: float, *, in_place: bool = False) -> Callable[[Call], list[Kernel]]:
    """An op over elements that writes `written` tensors like its largest input."""

    def read_each(call: Call) -> list[Kernel]:
        tensors = [(d, t) for d, t in zip(call.dims, call.types, strict=False) if d and t in _BYTES]
        n = max(math.prod(d) for d, _ in tensors)
        kind = tensors[0][1] if in_place else max((t for _, t in tensors), key=_BYTES.__getitem__)
        moved = call.tensor_bytes() + written * n * _BYTES[kind]
        uneven = any(math.prod(d) != n for d, _ in tensors) or not _aligned(call)
        return [(op, {"n": float(n), "uneven": float(uneven)}, moved)]

    return read_each


def _reduce(call: Call) -> list[Kernel]:
    dims = call.dims[0]
    over = json.loads(call.values[1]) if call.values[1:] and call.values[1].startswith("[") else []
    gone = {i % len(dims) for i in over} or set(range(len(dims)))
    rows = math.prod(d for i, d in enumerate(dims) if i not in gone)
    n = float(call.elements(0))
    return [("reduce", {"n": n, "rows": float(rows)}, call.tensor_bytes())]


def _by_row(op: str, passes: float) -> Callable[[Call], list[Kernel]]:
    """An op along the last dimension that touches `passes` tensors like its first input."""

    def read_row(call: Call) -> list[Kernel]:
        cols = call.dims[0][-1]
        n = call.elements(0)
        shape = {"n": float(n), "rows": n / cols, "cols": float(cols)}
        return [(op, shape, passes * n * _BYTES[call.types[0]])]

    return read_row


def _by_channel(op: str, passes: float) -> Callable[[Call], list[Kernel]]:
    """Batch normalisation: statistics over every dimension but the second."""

    def read_channel(call: Call) -> list[Kernel]:
        n = call.elements(0)
        shape = {"n": float(n), "rows": float(call.dims[0][1]), "cols": n / call.dims[0][1]}
        return [(op, shape, passes * n * _BYTES[call.types[0]])]

    return read_channel


def _embedding_backward(call: Call) -> list[Kernel]:
    """The gradient of every row that was looked up, and a table of zeros to add them to."""
    width, table = call.dims[0][-1], float(call.values[2])
    n = call.elements(0)
    moved = (2 * n + table * width) * _BYTES[call.types[0]]
    return [("embedding_backward", {"n": float(n), "rows": n / width}, moved)]


def _pool(op: str, at: int) -> Callable[[Call], list[Kernel]]:
    def read_pool(call: Call) -> list[Kernel]:
        x = call.dims[at]
        n = float(math.prod(x))
        return [(op, {"n": n}, 1.25 * n * _BYTES[call.types[0]] + 2 * n)]

    return read_pool


def _attention(
    direction: float, seq: int, head: int, mask: int, dropout: int
) -> Callable[[Call], list[Kernel]]:
    def read_attention(call: Call) -> list[Kernel]:
        q, k = call.dims[1 if direction else 0], call.dims[2 if direction else 1]
        shape = {"b": q[0], "heads": q[head], "sq": q[seq], "sk": k[seq], "d": q[-1]}
        shape["causal"] = float(call.values[mask] in ("1", "True"))
        shape["dropout"] = float(float(call.values[dropout]) > 0)
        return [("attention", {**shape, "direction": direction}, np.nan)]

    return read_attention


_READERS: dict[str, Callable[[Call], list[Kernel]]] = {
    "aten::mm": _product(0),
    "aten::addmm": _product(1),
    "aten::bmm": _product(0),
    "aten::cudnn_convolution": _conv,
    "aten::_conv_depthwise2d": _depthwise,
    "aten::convolution_backward": _conv_backward,
    "aten::add": _each("elementwise", 1),
    "aten::mul": _each("elementwise", 1),
    "aten::sub": _each("elementwise", 1),
    "aten::div": _each("elementwise", 1),
    "aten::add_": _each("elementwise", 1, in_place=True),
    "aten::mul_": _each("elementwise", 1, in_place=True),
    "aten::lerp_": _each("elementwise", 1, in_place=True),
    "aten::addcmul_": _each("elementwise", 1, in_place=True),
    "aten::addcdiv_": _each("elementwise", 1, in_place=True),
    "aten::sqrt": _each("elementwise", 1),
    "aten::clamp_min_": _each("elementwise", 1, in_place=True),
    "aten::threshold_backward": _each("elementwise", 1),
    "aten::hardswish_": _each("elementwise", 1, in_place=True),
    "aten::hardswish_backward": _each("elementwise", 1),
    "aten::gelu": _each("activation", 1),
    "aten::gelu_backward": _each("activation", 1),
    "aten::tanh": _each("activation", 1),
    "aten::tanh_backward": _each("activation", 1),
    "aten::pow": _each("activation", 1),
    "aten::native_dropout": _each("dropout", 1.25),
    "aten::native_dropout_backward": _each("elementwise", 1),
    "aten::_softmax": _by_row("softmax", 2),
    "aten::_log_softmax": _by_row("softmax", 2),
    "aten::_softmax_backward_data": _by_row("softmax_backward", 3),
    "aten::_log_softmax_backward_data": _by_row("softmax_backward", 3),
    "aten::native_layer_norm": _by_row("norm", 2),
    "aten::native_layer_norm_backward": _by_row("norm_backward", 5),
    "aten::cudnn_batch_norm": _by_channel("batch_norm", 3),
    "aten::native_batch_norm": _by_channel("batch_norm", 3),
    "aten::cudnn_batch_norm_backward": _by_channel("batch_norm_backward", 5),
    "aten::native_batch_norm_backward": _by_channel("batch_norm_backward", 5),
    "aten::max_pool2d_with_indices": _pool("pool", 0),
    "aten::max_pool2d_with_indices_backward": _pool("pool_backward", 1),
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::copy_": _each("copy", 0),
    "aten::sum": _reduce,
    "aten::mean": _reduce,
    "aten::_efficient_attention_forward": _attention(0.0, 1, 2, 9, 8),
    "aten::_efficient_attention_backward": _attention(1.0, 1, 2, 14, 11),
    "aten::_cudnn_attention_forward": _attention(0.0, 2, 1, 10, 9),
    "aten::_cudnn_attention_backward": _attention(1.0, 2, 1, 14, 13),
}
