"""What the host spends on each kind of call: chains of small calls, launches, calls without
kernels.

A chain of calls on tiny tensors is issued while the device keeps up easily, so its time is the
host's alone: Python, dispatch, autograd's record keeping, allocation and launches. Backward walks
the chain in the engine, so a call's share is its nodes, with the gradients of its parameters kept.

    forward    time of the chain / calls                                            (→ `_once`)
    backward   (backward of the chain − backward of an empty one) / calls

Rows are named `host.linear` and so on; dtype amp_bf16 is under autocast, casts included. All is
timed before any profiler has run, since a profiler slows launches even after it has stopped;
kernels are counted afterwards. Layout `profiled` is the same under torch's profiler: what a trace
says the host took, against what it takes.

Chains of small calls, one kind each: what the host cost of an operator is measured on.

A kind is what a model writes (`module.linear` called as a module, `linear` as a function), since
Python is part of the cost. Calls joined by `+` come together because one undoes the other's shape.

What lies between kernels, and what calls cost that run none.

    launch kernel   how long the tiny kernel itself runs, one after another
    launch stream   from one kernel's start to the next one's, in a stream that is never empty
    launch graph    the same as nodes of one replayed graph; host_seconds is one node's share
    launch memset   as stream, with a fill instead of a kernel
    host.item …     host_seconds of calls that wait, allocate or switch modes

The gap a stream leaves is `stream` less `kernel`; that of a graph is `graph` less `kernel`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from foretell_lab.bench.call import Place, use_precision
from foretell_lab.bench.case import Case, case
from foretell_lab.bench.clock import (
    UNSUPPORTED,
    Measured,
    busy,
    device_kernels,
    issue_seconds,
    mark,
    profile,
    quartiles,
    split,
    synchronize,
)

LENGTH = 24  # calls in a chain
# Batch, tokens, width and batch, channels, side: on a GPU large enough that libraries pick their
# usual kernels (the host does not wait for them), on a CPU small, since there work is waited for.
_ROWS = {True: (8, 256, 256), False: (2, 8, 16)}
_IMAGES = {True: (8, 64, 28), False: (2, 8, 6)}
Tensor = Any
Link = Callable[[Tensor], Tensor]  # one call, from what flows to what flows


_COUNT = 200
_AHEAD = 20_000_000  # cycles to sleep, some 10 ms, so that the host is ahead of the device
_DIRECTIONS = ("forward", "backward")
_DTYPES = ("fp32", "amp_bf16")
Within = Callable[[], AbstractContextManager[Any]]
Key = tuple[str, str]  # kind, dtype
Times = tuple[list[float], list[float]]  # forward, backward


@dataclass(frozen=True)
class Chain:
    """Calls of one kind, each with its own parameters, and the tensor that enters the first."""

    start: Tensor
    links: list[Link]

    def enter(self) -> Tensor:
        """What the first call takes: no leaf, so that calls may work in place."""
        return self.start.clone()

    def flow(self, x: Tensor) -> Tensor:
        """Issue all calls, one on the other's result."""
        for link in self.links:
            x = link(x)
        return x

    def forget(self) -> None:
        """Drop all gradients, as a step does before it begins."""
        self.start.grad = None
        for link in self.links:
            for parameter in _parameters(link):
                parameter.grad = None


def empty(place: Place) -> Chain:
    """A chain without calls."""
    return Chain(_rows(place), [])


def kinds() -> tuple[str, ...]:
    """Names of all kinds of call."""
    return (*_LAYERS, *_IMAGE_LAYERS, *_PLAIN)


def chain(kind: str, place: Place) -> Chain:
    """A chain of calls of one kind."""
    if kind in _PLAIN:
        return Chain(_rows(place), [_PLAIN[kind]] * LENGTH)
    if kind in _IMAGE_LAYERS:
        return Chain(_image(place), [_IMAGE_LAYERS[kind](place) for _ in range(LENGTH)])
    return Chain(_rows(place), [_LAYERS[kind](place) for _ in range(LENGTH)])


def _parameters(link: Link) -> list[Tensor]:
    """Parameters of a module, or tensors a function has closed over."""
    if isinstance(link, torch.nn.Module):
        return list(link.parameters())
    cells = [cell.cell_contents for cell in getattr(link, "__closure__", None) or ()]
    return [t for t in cells if isinstance(t, torch.Tensor) and t.requires_grad]


def _rows(place: Place) -> Tensor:
    return place.randn(*_ROWS[place.is_cuda], grad=True)


def _image(place: Place) -> Tensor:
    batch, channels, side = _IMAGES[place.is_cuda]
    return place.randn(batch, channels, side, side, grad=True)


def _module(made: Callable[[int], Any]) -> Callable[[Place], Link]:
    """A layer of rows called as a module, with its own parameters."""
    return lambda place: made(_ROWS[place.is_cuda][2]).to(place.device)


def _image_module(made: Callable[[int], Any]) -> Callable[[Place], Link]:
    """A layer of images called as a module."""
    return lambda place: made(_IMAGES[place.is_cuda][1]).to(place.device)


def _linear(place: Place) -> Link:
    width = _ROWS[place.is_cuda][2]
    weight, bias = place.randn(width, width, grad=True), place.randn(width, grad=True)
    return lambda x: F.linear(x, weight, bias)


def _embedding(place: Place) -> Link:
    batch, tokens, width = _ROWS[place.is_cuda]
    table, at = place.randn(1000, width, grad=True), place.whole(1000, batch, tokens)
    return lambda x: F.embedding(at, table) + x


def _attention(x: Tensor) -> Tensor:
    heads = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads)
    return mixed.transpose(1, 2).reshape(x.shape)


_LAYERS: dict[str, Callable[[Place], Link]] = {
    "linear": _linear,
    "module.linear": _module(lambda n: torch.nn.Linear(n, n)),
    "module.layer_norm": _module(torch.nn.LayerNorm),
    "module.dropout": _module(lambda n: torch.nn.Dropout(0.1)),
    "module.gelu": _module(lambda n: torch.nn.GELU()),
    "module.identity": _module(lambda n: torch.nn.Identity()),
    "embedding+add": _embedding,
}
_IMAGE_LAYERS: dict[str, Callable[[Place], Link]] = {
    "module.conv2d": _image_module(lambda c: torch.nn.Conv2d(c, c, 3, padding=1, bias=False)),
    "module.conv2d_bias": _image_module(lambda c: torch.nn.Conv2d(c, c, 3, padding=1)),
    "module.conv2d_1x1": _image_module(lambda c: torch.nn.Conv2d(c, c, 1, bias=False)),
    "module.conv2d_depthwise": _image_module(
        lambda c: torch.nn.Conv2d(c, c, 3, padding=1, groups=c, bias=False)
    ),
    "module.batch_norm": _image_module(torch.nn.BatchNorm2d),
    "module.group_norm": _image_module(lambda c: torch.nn.GroupNorm(4, c)),
    "module.silu": _image_module(lambda c: torch.nn.SiLU()),
    "add+relu_": lambda place: lambda x: F.relu_(x + x),
    "max_pool": lambda place: lambda x: F.max_pool2d(x, 3, 1, 1),
    "avg_pool": lambda place: lambda x: F.avg_pool2d(x, 3, 1, 1),
    "adaptive_pool": lambda place: lambda x: F.adaptive_avg_pool2d(x, x.shape[-1]),
    "interpolate": lambda place: lambda x: F.interpolate(x, size=x.shape[2:]),
}
_PLAIN: dict[str, Link] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "dropout": lambda x: F.dropout(x, 0.1, training=True),
    "add": lambda x: x + x,
    "mul": lambda x: x * x,
    "sub": lambda x: x - x,
    "div": lambda x: x / (x.detach() + 9.0),
    "exp": torch.exp,
    "sqrt": lambda x: x.abs().sqrt(),
    "where": lambda x: torch.where(x.detach() > 0, x, 0.0),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "stack+sum": lambda x: torch.stack((x, x)).sum(0),
    "split+cat": lambda x: torch.cat(x.split(x.shape[-1] // 4, dim=-1), dim=-1),
    "add_scalar": lambda x: x + 1.0,
    "mul_scalar": lambda x: x * 0.5,
    "pow": lambda x: x**2,
    "softmax": lambda x: F.softmax(x, dim=-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "matmul": lambda x: torch.matmul(torch.matmul(x, x.transpose(1, 2)), x),
    "attention+views": _attention,
    "view": lambda x: x.view(x.shape),
    "reshape": lambda x: x.reshape(x.shape),
    "transpose+transpose": lambda x: x.transpose(0, 1).transpose(0, 1),
    "permute": lambda x: x.permute(0, 1, 2),
    "slice": lambda x: x[:, :, :],
    "unsqueeze+squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "expand": lambda x: x.expand(x.shape),
    "chunk+cat": lambda x: torch.cat(x.chunk(2, dim=-1), dim=-1),
    "cat": lambda x: torch.cat((x[:1], x[1:])),
    "mean+expand": lambda x: x.mean(-1, keepdim=True).expand(x.shape),
    "sum+expand": lambda x: x.sum(-1, keepdim=True).expand(x.shape),
    "transposed_copy": lambda x: x.transpose(1, 2).contiguous().view(x.shape),
    "cast_both_ways": lambda x: x.to(torch.bfloat16).to(torch.float32),
    "clone": lambda x: x.clone(),
    "roll": lambda x: torch.roll(x, 1, 1),
    "masked_fill": lambda x: x.masked_fill(x.detach() > 9, 0.0),
    "index_select": lambda x: x[:, torch.arange(x.shape[1], device=x.device)],
}


def time_launches(place: Place) -> list[tuple[Case, Measured]]:
    """Intervals and plain calls; to be called before any profiler runs."""
    x = place.randn(1024)
    found = [
        (_host_case(f"host.{n}", "-", calls=1), _issued(c, place)) for n, c in _calls(x).items()
    ]
    if place.is_cuda:
        found.append((_host_case("launch", "stream"), _interval(lambda: x.add_(1.0), _COUNT)))
        found.append((_host_case("launch", "memset"), _interval(x.zero_, _COUNT)))
        found.append((_host_case("launch", "graph"), _interval(_graph(x).replay, 1)))
    return found


def kernel_rows(place: Place) -> Iterator[tuple[Case, Measured]]:
    """How long the tiny kernel of the intervals runs; a profiler runs."""
    if not place.is_cuda:
        return
    x = place.randn(1024)
    with profile() as profiler:
        mark()
        for _ in range(_COUNT):
            x.add_(1.0)
        mark()
        torch.cuda.synchronize()
    took = [busy([kernel]) for kernel in split(device_kernels(profiler))[0].kernels]
    low, middle, high = quartiles(took)
    yield _host_case("launch", "kernel"), Measured(middle, (high - low) / middle, 1)


def _host_case(op: str, layout: str, **shape: int) -> Case:
    return case(op, "forward", "fp32", layout, **(shape or {"n": 1024, "count": _COUNT}))


def _calls(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    def autocast() -> None:
        with torch.autocast(x.device.type, torch.bfloat16):
            pass

    return {
        "item": x[0].item,
        "empty_tensor": lambda: torch.empty_like(x),
        "autocast_enter_exit": autocast,
        "add_": lambda: x.add_(1.0),
        "zero_": x.zero_,
        "size": x.size,
    }


def _issued(call: Callable[[], object], place: Place) -> Measured:
    return Measured(math.nan, 0.0, 0, issue_seconds(call, place, 100))


def _graph(x: torch.Tensor) -> torch.cuda.CUDAGraph:
    """`_COUNT` small kernels captured."""
    x.add_(1.0)
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for _ in range(_COUNT):
            x.add_(1.0)
    return made


def _interval(run: Callable[[], object], calls: int) -> Measured:
    """Device and host seconds a kernel, with the device kept behind the host."""
    device, host = [], []
    for _ in range(12):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(_AHEAD)
        first.record()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        host.append((time.perf_counter() - start) / _COUNT)
        last.record()
        torch.cuda.synchronize()
        device.append(first.elapsed_time(last) * 1e-3 / _COUNT)
    low, middle, high = quartiles(device[2:])
    return Measured(middle, (high - low) / middle, 1, quartiles(host[2:])[1])


_ROUNDS, _REPEATS, _WARM = 4, 8, 2  # rounds lie apart, so that one disturbance spoils one


@dataclass(frozen=True)
class Timed:
    """Seconds of every chain, and of an empty one backward."""

    chains: dict[Key, Times | str]
    nothing: list[float]


def time_chains(place: Place, ends: float, only: Sequence[str] = ()) -> Timed:
    """Time chains of every kind until time is up; to be called before any profiler runs."""
    use_precision("fp32")
    keys = [(kind, dtype) for kind in only or kinds() for dtype in _DTYPES]
    found: dict[Key, Times | str] = {key: ([], []) for key in keys}
    nothing: list[float] = []
    for _ in range(_ROUNDS):
        nothing += _times(empty(place), place, nullcontext)[1]
        for key in (k for k in keys if time.monotonic() < ends):
            found[key] = _longer(found[key], _try_times(key, place))
    for key in (k for k in keys if found[k] == ([], [])):
        found[key] = "no time was left"
    return Timed(found, nothing)


def time_profiled(place: Place, ends: float, only: Sequence[str] = ()) -> Timed:
    """The same while torch's profiler records operators, shapes and kernels as for a trace."""
    with torch.profiler.profile(record_shapes=True):
        return time_chains(place, ends, only)


def rows(place: Place, timed: Timed, layout: str = "-") -> Iterator[tuple[Case, Measured | str]]:
    """Host seconds a call of each kind; counts kernels, so a profiler runs."""
    nothing = statistics.median(timed.nothing)
    alone = case("host.empty", "backward", "fp32", layout, calls=1)
    yield alone, _measured(timed.nothing, 0.0, 1, 0.0)
    counts = _kernel_counts(place, [k for k, t in timed.chains.items() if not isinstance(t, str)])
    for key, times in timed.chains.items():
        for i, direction in enumerate(_DIRECTIONS):
            chain_case = case(f"host.{key[0]}", direction, key[1], layout, calls=LENGTH)
            if isinstance(times, str):
                yield chain_case, times
                continue
            yield chain_case, _measured(times[i], nothing if i else 0.0, LENGTH, counts[key][i])


def _measured(times: Sequence[float], nothing: float, calls: int, kernels: float) -> Measured:
    low, middle, high = quartiles(times)
    spread = (high - low) / middle if middle else 0.0
    return Measured(math.nan, spread, round(kernels), max(0.0, middle - nothing) / calls)


def _longer(known: Times | str, more: Times | str) -> Times | str:
    if isinstance(known, str) or isinstance(more, str):
        return known if isinstance(known, str) else more
    return known[0] + more[0], known[1] + more[1]


def _try_times(key: Key, place: Place) -> Times | str:
    try:
        return _times(chain(key[0], place), place, _within(key[1], place))
    except UNSUPPORTED as why:
        return str(why)


def _within(dtype: str, place: Place) -> Within:
    kind = "cuda" if place.is_cuda else "cpu"
    return (lambda: torch.autocast(kind, torch.bfloat16)) if dtype == "amp_bf16" else nullcontext


def _times(calls: Chain, place: Place, within: Within) -> Times:
    took = [_once(calls, place, within) for _ in range(_WARM + _REPEATS)][_WARM:]
    return [there for there, _ in took], [back for _, back in took]


def _once(calls: Chain, place: Place, within: Within) -> tuple[float, float]:
    """Seconds to issue the chain, and its backward."""
    calls.forget()
    entered = calls.enter()
    synchronize(place)
    start = time.perf_counter()
    with within():
        out = calls.flow(entered)
    there = time.perf_counter() - start
    gradient = torch.ones_like(out)
    synchronize(place)
    start = time.perf_counter()
    out.backward(gradient)
    return there, time.perf_counter() - start


def _kernel_counts(place: Place, keys: Sequence[Key]) -> dict[Key, tuple[float, float]]:
    """Kernels a call launches forward and backward; zero where no profiler sees them."""
    if not place.is_cuda:
        return dict.fromkeys(keys, (0.0, 0.0))
    with profile() as profiler:
        for kind, dtype in keys:
            _marked(chain(kind, place), _within(dtype, place))
        torch.cuda.synchronize()
    counts = [len(span.kernels) / LENGTH for span in split(device_kernels(profiler))]
    return {key: (counts[2 * i], counts[2 * i + 1]) for i, key in enumerate(keys)}


def _marked(calls: Chain, within: Within) -> None:
    entered = calls.enter()
    mark()
    with within():
        out = calls.flow(entered)
    mark()
    gradient = torch.ones_like(out)
    mark()
    out.backward(gradient)
    mark()
