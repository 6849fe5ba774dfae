"""Measured kernels as columns, read from the files of a truth folder.

Each source timed kernels its own way; a `Measured` keeps what was asked (op, shape), what was
read (seconds) and how the clock was held, so that a price can be put beside the reading:

    neusight        CUDA events around one eager PyTorch call: the host's dispatch is inside
    aiconfigurator  kernels replayed from a CUDA graph: the device alone
    deepbench       many calls of the vendor's library between two clock reads
    models          CUDA events around each op of a model, forward and backward (NeuSight's labels)
    h200            kernel durations of a profiler trace: the device alone

Files that are missing give nothing; a folder with other devices or rows reads the same way.
"""

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Columns = dict[str, Array]

_MANY = 200  # readings from which the shortest can be known
# NeuSight's elementwise names: how many tensors of the output's size each reads and writes.
_TENSORS = {"add": 3, "mul": 3, "div": 3, "pow": 3}


@dataclass(frozen=True)
class Measured:
    """Readings of one source on one device for one op; a reading may be of several kernels."""

    source: str
    device: str  # as the source names it
    op: str
    dtype: str
    call: str  # what the host dispatched, for sources whose clock includes it
    shape: Columns  # one entry a kernel
    bytes: Array | None  # one entry a kernel, where the op has no shape that says it
    reading: npt.NDArray[np.int64]  # which reading each kernel belongs to
    seconds: Array  # one entry a reading
    ops: npt.NDArray[np.str_] | None = None  # one entry a kernel, where they differ from `op`
    shortest: float = 0.0  # seconds of the shortest readings of the whole file; 0 where few

    def __len__(self) -> int:
        return len(self.seconds)


def read(folder: Path) -> list[Measured]:
    """Every kernel measurement under a truth folder."""
    kernels = folder / "kernels"
    found: list[Measured] = []
    for reader in (_neusight, _aiconfigurator, _deepbench_gemm, _deepbench_conv, _models):
        found += reader(kernels)
    return found


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="") as lines:
        return list(csv.DictReader(lines))


def _grouped(
    rows: Iterable[dict[str, str]], *keys: str
) -> Iterator[tuple[tuple[str, ...], list[dict[str, str]]]]:
    groups: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[k] for k in keys)].append(row)
    yield from sorted(groups.items())


def _column(rows: list[dict[str, str]], key: str) -> Array:
    return np.array([float(r[key] or "nan") for r in rows])


def _plain(
    source: str,
    device: str,
    op: str,
    dtype: str,
    call: str,
    shape: Columns,
    seconds: Array,
    moved: Array | None = None,
) -> Measured:
    kept = np.isfinite(seconds) & (seconds > 0)
    shape = {k: v[kept] for k, v in shape.items()}
    moved = None if moved is None else moved[kept]
    order = np.arange(int(kept.sum()))
    shortest = 0.0
    if len(order) >= _MANY:
        # one convolution in a thousand is too short for the clock, one in fifty of the others
        shortest = float(np.quantile(seconds[kept], 0.001 if op == "conv" else 0.02))
    return Measured(
        source, device, op, dtype, call, shape, moved, order, seconds[kept], shortest=shortest
    )


def _neusight(folder: Path) -> list[Measured]:
    """fp32 kernels; of the columns B, M, N, K the sum runs over N and K is the width of C."""
    found = []
    for call in ("bmm", "linear"):
        for (device,), rows in _grouped(_rows(folder / f"neusight_{call}_fp32.csv.gz"), "Device"):
            names = {"b": "B", "m": "M", "n": "K", "k": "N"}
            shape = {k: _column(rows, v) for k, v in names.items()}
            shape["tb"] = np.full(len(rows), float(call == "linear"))  # y = x·Wᵀ
            found.append(_plain("neusight", device, "gemm", "fp32", call, shape, _milli(rows)))
    for (device,), rows in _grouped(_rows(folder / "neusight_conv_fp32.csv.gz"), "Device"):
        found.append(
            _plain("neusight", device, "conv", "fp32", "conv", _neusight_conv(rows), _milli(rows))
        )
    for name, op in (("elementwise", "elementwise"), ("softmax", "softmax"), ("ln", "norm")):
        table = _rows(folder / f"neusight_{name}_fp32.csv.gz")
        for (device, call), rows in _grouped(table, "Device", "OPName"):
            shape = {"rows": _column(rows, "B"), "cols": _column(rows, "H")}
            moved = 4 * _TENSORS.get(call, 2) * shape["rows"] * shape["cols"]
            found.append(_plain("neusight", device, op, "fp32", call, shape, _milli(rows), moved))
    return found


def _milli(rows: list[dict[str, str]]) -> Array:
    return _column(rows, "Latency") * 1e-3


def _neusight_conv(rows: list[dict[str, str]]) -> Columns:
    size, filters = _column(rows, "Input_Size"), _column(rows, "Kernel_Szie")  # spelt so there
    return {
        "n": _column(rows, "B"),
        "c": _column(rows, "Input_Channel"),
        "h": size,
        "w": size,
        "k": _column(rows, "Output_Channel"),
        "r": filters,
        "s": filters,
        "stride": _column(rows, "Stride"),
        "pad": _column(rows, "Padding"),
    }


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8", "fp8_block": "fp8", "int8": "int8"}


def _aiconfigurator(folder: Path) -> list[Measured]:
    found = []
    for path in sorted(folder.glob("aiconfigurator_gemm*.csv.gz")):
        for (device, kind), rows in _grouped(_rows(path), "device", "gemm_dtype"):
            if kind not in _DTYPES:
                continue
            shape = {k: _column(rows, k) for k in "mnk"}
            seconds = _column(rows, "latency") * 1e-3
            found.append(
                _plain("aiconfigurator", device, "gemm", _DTYPES[kind], "", shape, seconds)
            )
    return found


def _deepbench_dtype(precision: str) -> str:
    """`pseudo fp16` stores halves and multiplies floats: it is priced, like fp32, by its math."""
    return "fp16" if precision.startswith("fp16") else "fp32"


def _deepbench_gemm(folder: Path) -> list[Measured]:
    found = []
    table = _rows(folder / "deepbench_train_gemm.csv")
    for (device, precision), rows in _grouped(table, "device", "precision"):
        if precision.startswith("pseudo"):
            continue
        # column-major there: C's contiguous dimension M is our n, and A and B change places
        shape = {"m": _column(rows, "N"), "n": _column(rows, "M"), "k": _column(rows, "K")}
        shape["ta"] = np.array([float(r["transB"] == "T") for r in rows])
        shape["tb"] = np.array([float(r["transA"] == "T") for r in rows])
        seconds = _column(rows, "time_ms") * 1e-3
        dtype = _deepbench_dtype(precision)
        if dtype == "fp16":  # odd sizes run at full rate there: it pads them to multiples of 8
            shape |= {k: np.ceil(shape[k] / 8) * 8 for k in "mnk"}
        found.append(_plain("deepbench", device, "gemm", dtype, "", shape, seconds))
    return found


def _deepbench_conv(folder: Path) -> list[Measured]:
    found = []
    table = _rows(folder / "deepbench_train_conv.csv")
    names = {"n": "N", "c": "C", "h": "H", "w": "W", "k": "K", "r": "R", "s": "S"}
    names |= {"stride": "stride_h", "pad": "pad_h"}
    ops = {"conv": "fwd_ms", "conv_dgrad": "bwd_inputs_ms", "conv_wgrad": "bwd_params_ms"}
    for (device, precision), rows in _grouped(table, "device", "precision"):
        if precision.startswith("pseudo"):
            continue
        shape = {k: _column(rows, v) for k, v in names.items()}
        dtype = _deepbench_dtype(precision)
        # the readings on matrix units leave no time to turn the layout over
        shape["nhwc"] = np.full(len(rows), float(dtype == "fp16"))
        for op, key in ops.items():
            seconds = _column(rows, key) * 1e-3
            found.append(_plain("deepbench", device, op, dtype, "", shape, seconds))
    return found


def _models(folder: Path) -> list[Measured]:
    """Products of whole models and what moves more than the caches hold between them."""
    found = []
    for (device,), rows in _grouped(_rows(folder / "neusight_train_op_labels.csv.gz"), "device"):
        found += _model_products(device, rows)
        found += _model_moves(device, rows)
    return found


def _model_products(device: str, rows: list[dict[str, str]]) -> list[Measured]:
    """Matmuls forward (one kernel) and backward (two, of the same flop each)."""
    products = [(p, r) for r in rows if (p := _product(r)) is not None]
    if not products:
        return []
    b, m, n, k, tb = np.array([p for p, _ in products], float).T
    forward = _column([r for _, r in products], "fw_ms") * 1e-3
    backward = _column([r for _, r in products], "bw_ms") * 1e-3
    shape = {"b": b, "m": m, "n": n, "k": k, "tb": tb}
    both = {"b": np.r_[b, b], "m": np.r_[m, k], "n": np.r_[k, n], "k": np.r_[n, m]}
    order = np.arange(len(b))
    twice = np.r_[order, order]
    return [
        _plain("models", device, "gemm", "fp32", "forward", shape, forward),
        Measured("models", device, "gemm", "fp32", "backward", both, None, twice, backward),
    ]


# What an op of the model labels is, by a word in its target.
_MOVES = {
    "truediv": "elementwise",
    "function mul": "elementwise",
    "function add": "elementwise",
    "gelu": "activation",
    "method pow": "activation",
    "tanh": "activation",
    "softmax": "softmax",
    "dropout": "dropout",
}
_LARGE = 250e6  # bytes: more than any cache keeps for the next call
_HOST = 3e-5  # seconds: a reading below is of a call that launched nothing (dropout of nothing)


def _model_moves(device: str, rows: list[dict[str, str]]) -> list[Measured]:
    """Large memory-bound ops of whole models, forward."""
    groups: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for row in rows:
        op = next((o for word, o in _MOVES.items() if word in row["target"]), "")
        out = [int(s) for s in row["output_shape"].strip("()").split(",") if s.strip()]
        n = float(np.prod(out))
        shapes = [s for s in json.loads(row["input_shapes"]) if isinstance(s, list)]
        moved = 4 * (n + sum(float(np.prod(s)) for s in shapes)) + (n if op == "dropout" else 0)
        seconds = float(row["fw_ms"]) * 1e-3
        if op and moved >= _LARGE and seconds > _HOST:
            groups[op].append((n / out[-1], out[-1], moved, seconds))
    found = []
    for op, values in sorted(groups.items()):
        count, cols, moves, took = np.array(values).T
        shape = {"rows": count, "cols": cols}
        found.append(_plain("models", device, op, "fp32", "forward", shape, took, moves))
    return found


def _product(row: dict[str, str]) -> tuple[float, float, float, float, float] | None:
    """b, m, n, k and tb of a row of the model labels that is a matmul."""
    shapes = [s for s in json.loads(row["input_shapes"]) if isinstance(s, list)]
    out = [int(s) for s in row["output_shape"].strip("()").split(",") if s.strip()]
    target = row["target"]
    if "addmm" in target:
        (m, k), (_, n) = shapes[1], shapes[2]
        return 1, m, n, k, 0
    if "matmul" in target:
        a, c = shapes[:2]
        return float(np.prod(a[:-2])), a[-2], c[-1], a[-1], 0
    layers = ("dense", "query", "key", "value", "fc1", "fc2", "lm_head", "_proj")
    if row["op"] == "call_module" and len(shapes) == 1 and target.endswith(layers):
        return 1, float(np.prod(out[:-1])), out[-1], shapes[0][-1], 1
    return None
