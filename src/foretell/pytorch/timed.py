"""Times single ops by class, number format and shape (→ cost.timed).

Core seconds of one call where one thread computes, wall seconds where there are more; the shortest
of a few, so that what else the machine does is not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from foretell.cost.kernel import class_of
from foretell.cost.price import TimedOp

Tensor = Any
Sizes = dict[str, float]
Run = Callable[[], object]
_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_SHORT = 2e-3  # seconds that calls are repeated for, at least
_ROUNDS = 7
_LARGEST = 2**28  # numbers of one tensor: larger ones are interpolated
_SIDE = 8  # of the images that pools make where they are timed


def seconds(op: TimedOp) -> float | None:
    """Seconds of one call; None for what cannot be built, or is too large."""
    made = _ROWS.get(op.op) or _ROWS.get(class_of(op.op))
    dtype = _DTYPES.get(op.dtype)
    if made is None or dtype is None:
        return None
    try:
        with torch.no_grad():
            return timed(made(dict(op.shape), dtype))
    except (RuntimeError, KeyError, ValueError):  # no kernel of this format, or no such shape
        return None


def clock() -> Callable[[], float]:
    """Core seconds of this thread where it computes alone, else wall seconds."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def timed(run: Run) -> float:
    """Seconds of one call of a function."""
    now = clock()
    kept = run()  # as in a step, memory is not given back between two calls
    many = 1
    found: list[float] = []
    while len(found) < _ROUNDS:
        start = now()
        for _ in range(many):
            kept = run()
        took = now() - start
        if took < _SHORT / _ROUNDS and many < 4096:
            many *= 4
            continue
        found.append(took / many)
    del kept
    return min(found)


def launch() -> float:
    """Seconds that Python, the dispatcher and autograd add to one op of a training step."""
    width, layers = 8, 16
    body = [m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model, x = torch.nn.Sequential(*body), torch.randn(2, width)

    def step() -> None:
        model(x).sum().backward()

    ops = [
        ("gemm", {"m": 2.0, "n": 8.0, "k": 8.0}, 3),
        ("reduce", {"n": 16.0, "rows": 8.0}, 1),
        ("elementwise", {"n": 16.0}, 2),
    ]
    alone = 0.0
    for name, shape, times in ops:
        took = seconds(TimedOp(name, "fp32", tuple(sorted(shape.items()))))
        alone += times * layers * (took or 0.0)
    many = sum(times for *_, times in ops) * layers
    return max((timed(step) - alone) / many, 0.0)


def _randn(*dims: float, dtype: Any) -> Tensor:
    sizes = [max(round(d), 1) for d in dims]
    if math.prod(sizes) > _LARGEST:
        raise ValueError
    return torch.randn(sizes).to(dtype)


def _gemm(s: Sizes, dtype: Any) -> Run:
    b, m, n, k = (s.get(key, 1.0) for key in ("b", "m", "n", "k"))
    a = _randn(b, k, m, dtype=dtype).mT if s.get("ta") else _randn(b, m, k, dtype=dtype)
    c = _randn(b, n, k, dtype=dtype).mT if s.get("tb") else _randn(b, k, n, dtype=dtype)
    return (lambda: torch.mm(a[0], c[0])) if b <= 1 else (lambda: torch.bmm(a, c))


def _conv(way: int) -> Callable[[Sizes, Any], Run]:
    """A convolution (0), its gradient for the input (1) or for the weights (2)."""

    def made(s: Sizes, dtype: Any) -> Run:
        deep = ("d",) if "d" in s else ()
        groups = int(s.get("groups", 1))
        x = _randn(s["n"], s["c"], *(s[k] for k in (*deep, "h", "w")), dtype=dtype)
        taps = [s.get(k, 1.0) for k in (*(("t",) if deep else ()), "r", "s")]
        w = _randn(s["k"], s["c"] / groups, *taps, dtype=dtype)
        sides = len(taps)
        stride, pad = [int(s.get("stride", 1))] * sides, [int(s.get("pad", 0))] * sides
        options = (stride, pad, [1] * sides, False, [0] * sides, groups)

        def forward() -> Tensor:
            return torch.ops.aten.convolution(x, w, None, *options)

        g = torch.randn_like(forward())
        mask = [way == 1, way == 2, False]
        if not way:
            return forward
        return lambda: torch.ops.aten.convolution_backward(g, x, w, None, *options, mask)

    return made


def _attention(s: Sizes, dtype: Any) -> Run:
    heads, d = (s.get("b", 1.0), s.get("heads", 1.0)), s["d"]
    q = _randn(*heads, s["sq"], d, dtype=dtype)
    k, v = (_randn(*heads, s["sk"], d, dtype=dtype) for _ in range(2))
    causal = bool(s.get("causal"))
    function = partial(F.scaled_dot_product_attention, is_causal=causal)
    return _called(function, q, k, v, back=bool(s.get("direction")))


def _called(function: Callable[..., Tensor], *given: Tensor, back: bool) -> Run:
    """A function of tensors, or its gradients for all of them."""
    if not back:
        return lambda: function(*given)
    with torch.enable_grad():
        for one in given:
            one.requires_grad_()
        out = function(*given)
    g = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, given, g, retain_graph=True)


def _count(s: Sizes) -> float:
    return s.get("n") or s["rows"] * s["cols"]


def _elementwise(s: Sizes, dtype: Any) -> Run:
    """A fill, a function of one tensor or of two: by how many tensors are read and written."""
    n = _count(s)
    x = _randn(n, dtype=dtype)
    passes = s.get("bytes", 2.0 * n * x.element_size()) / (n * x.element_size())
    if passes < 1.5:
        return lambda: x.zero_()
    if passes < 2.5:
        return lambda: torch.relu(x)
    y = _randn(n, dtype=dtype)
    return lambda: torch.add(x, y)


def _rows(s: Sizes, dtype: Any) -> Tensor:
    if "rows" in s and "cols" in s:
        return _randn(s["rows"], s["cols"], dtype=dtype)
    cols = min(_count(s), 1024.0)
    return _randn(_count(s) / cols, cols, dtype=dtype)


def _norm(s: Sizes, dtype: Any, *, back: bool = False) -> Run:
    x = _rows(s, dtype)
    weight, bias = (torch.ones(x.shape[-1], dtype=dtype) for _ in range(2))
    return _called(lambda x, w, b: F.layer_norm(x, w.shape, w, b), x, weight, bias, back=back)


def _softmax(s: Sizes, dtype: Any, *, back: bool = False) -> Run:
    x = _rows(s, dtype)
    out = torch.softmax(x, -1)
    if back:
        return lambda: torch.ops.aten._softmax_backward_data(x, out, -1, x.dtype)
    return lambda: torch.softmax(x, -1)


def _reduce(s: Sizes, dtype: Any) -> Run:
    rows = s.get("rows", 1.0)
    x = _randn(_count(s) / rows, rows, dtype=dtype)
    return lambda: x.sum(0)


def _embedding(s: Sizes, dtype: Any, *, back: bool = False) -> Run:
    cols = s.get("cols") or 256.0
    rows = s.get("rows") or _count(s) / cols
    g = _randn(rows, cols, dtype=dtype)
    at = torch.randint(max(len(g), 1), (len(g),))
    if back:
        return lambda: torch.ops.aten.embedding_dense_backward(g, at, len(g), -1, False)
    return lambda: F.embedding(at, g)


def _pool(s: Sizes, dtype: Any, *, back: bool = False) -> Run:
    """Windows of two by two; the numbers that are counted are those of the result."""
    x = _randn(1, _count(s) / _SIDE**2, 2 * _SIDE, 2 * _SIDE, dtype=dtype)
    return _called(partial(F.max_pool2d, kernel_size=2, return_indices=not back), x, back=back)


def _batch_norm(s: Sizes, dtype: Any, *, back: bool = False) -> Run:
    channels = s.get("rows") or 64.0
    x = _randn(8, channels, _count(s) / channels / 8, dtype=dtype)
    weight, bias = (torch.ones(x.shape[1], dtype=dtype) for _ in range(2))
    norm = partial(F.batch_norm, running_mean=None, running_var=None, training=True)
    return _called(lambda x, w, b: norm(x, weight=w, bias=b), x, weight, bias, back=back)


def _plain(function: Callable[[Tensor], Tensor]) -> Callable[[Sizes, Any], Run]:
    """A function of single numbers."""
    return lambda s, dtype: partial(function, _randn(_count(s), dtype=dtype))


def _back(made: Callable[..., Run]) -> Callable[[Sizes, Any], Run]:
    return lambda s, dtype: made(s, dtype, back=True)


_ROWS: dict[str, Callable[[Sizes, Any], Run]] = {
    "gemm": _gemm,
    "conv": _conv(0),
    "conv_dgrad": _conv(1),
    "conv_wgrad": _conv(2),
    "attention": _attention,
    "elementwise": _elementwise,
    "activation": _plain(F.gelu),
    "copy": _plain(torch.clone),
    "norm": _norm,
    "norm_backward": _back(_norm),
    "softmax": _softmax,
    "softmax_backward": _back(_softmax),
    "reduce": _reduce,
    "embedding": _embedding,
    "embedding_backward": _back(_embedding),
    "pool": _pool,
    "pool_backward": _back(_pool),
    "batch_norm": _batch_norm,
    "batch_norm_backward": _back(_batch_norm),
}
