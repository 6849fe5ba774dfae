"""What a fused op costs: thousands of regions at once, corrected by regions measured on the device.

    price = fused_price(regions, device)
    price.seconds, price.sigma

A region is columns, see `foretell.cost.fused_regions`. A GPU's are lowered to the kernels of its
compiler first (→ `fused_kernels`); each different kernel is walked, priced by a formula, and
corrected by the mean of networks trained on measured regions. The formula answers alone where no
network ships for the kind of device or the caller wants none. `sigma` is the spread of
ln(real/priced): exp(±1.2816 · sigma) holds 80 %. On a device the network was not trained on, what
it sees are ratios to that device's rates and sigma is the formula's own on devices it was not
fitted to, if larger.

The formula, from what kernels move and compute:

    seconds = start · (1 + more · (kernels − 1))
            + (memoryᵖ + computeᵖ + loneᵖ)^(1/p) + product

    memory    latency, and what memory must move over its bandwidth joined (a norm of power `join`)
              with what the second-level cache must: fresh tensors, small results and what is read
              again may stay there
    compute   elementary operations over the vector lanes' rate, more in bf16 and in odd rows
    lone      the longest reduction that too few units share
    product   a matmul's own time where known, else its roofline

On a CPU

    seconds = start + more · (nests − 1) + given + (memoryᵖ + (compute + lone)ᵖ)^(1/p) + product

    given     a share for every tensor that is passed over
    memory    bytes over the bandwidth of one stream: what was evicted comes from memory; what is
              fresh and what later passes read again comes from the cache that holds it (a core's
              own, or the last one); what leaves is fetched before it is written; blocks too large
              for the allocator to keep are paged in
    compute   elementary operations over the vector lanes' rate, more in bf16, in partial vectors
              and in reductions, which wait for their own accumulator; booleans in memory are
              packed and unpacked one by one,
              and what uses a concatenation asks for its part at every place
    lone      rows begun

Constants (`tables/fused.toml`, `tables/fused_host.toml`) are fitted per kind of device to measured
regions; they are shares of the device's own rates, so another device needs its preset and nothing
else. A CPU's lines are plain arithmetic, so that the same are fitted on tensors
(`foretell_lab.fused.host_fit`) and answer on arrays.

The network: sizes are logarithms of bytes against the second-level cache and of places against the
lanes, times are logarithms against the formula's, so that one trained on one device can be used for
another. Among them are the blocks that Inductor (torch 2.11) cuts a kernel into, each a program on
one unit: a reduction's block has so many rows and so many places of each; what does not fit is a
turn of a loop, and sizes are rounded up to powers of two (`triton_heuristics`). Each node starts
from its op's vector and its features. In every layer it receives from what it reads and from what
reads it the mean and the largest of their messages, each with the edge's features. What remains is
pooled over the region's nodes, joined with features of the whole, and two dense layers answer
ln(measured/formula) and its spread. `foretell_lab.fused.network` is the same network on PyTorch
Geometric; a test holds both equal.

`foretell bench --fused` writes corrections of one device into a file: ln(measured/priced) as a sum
over the kinds of cost a region has (starts, memory, arithmetic, long reductions, matmuls: each by
its share of the formula's time). The environment variable FORETELL_FUSED names such a file for
every price of a process; it counts for the device it was measured on and no other.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster.node import Device
from foretell.compiled import H2, I1, compiled
from foretell.cost.fused_kernels import Lowered, lowered
from foretell.cost.fused_regions import (
    HOST_WEIGHT,
    KIND_CODE,
    KINDS,
    NESTED,
    SIZE,
    WALKED,
    WEIGHT,
    WORDS,
    Regions,
    Walk,
    distinct,
    nested,
    walked,
)  # fmt: skip
from foretell.cost.kernel import Price
from foretell.cost.price import dense
from foretell.errors import InputError
from foretell.io import read_toml

Array = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Constants = Mapping[str, float]
Weights = Mapping[str, Floats]
VARIABLE = "FORETELL_FUSED"
TUNED_KINDS = ("start", "memory", "compute", "lone", "product", "kernels")
_TERMS = TUNED_KINDS[:-1]  # of the formula
# The device each sort of network was trained on, and its file.
_TRAINED = {"gpu": "h200", "kernel": "h200", "cpu": "epyc-core"}
_FILES = {"gpu": "fused_net.npz", "kernel": "fused_net_kernel.npz", "cpu": "fused_net_cpu.npz"}
_CHUNK = 1024  # regions answered at once, to keep what is held small
# How much wider the spread is on a device without measured fused regions: what the kernel formula
# shows between devices it was fitted to and others (`tables/kernel.toml`, sigma, elementwise).
_ELSEWHERE = 0.12
PEAK = 0.6  # of a CPU's peak that a product reaches where its own time is unknown
_OWN = 2.0**20  # bytes of cache a core has to itself: Zen 4's second level


@dataclass(frozen=True)
class Tuning:
    """Corrections of one device: a factor's logarithm by kind of cost, and the spread left."""

    device: str
    factors: Mapping[str, float]
    sigma: float
    readings: int


def fused_price(
    regions: Regions, device: Device, *, learned: bool = True, tuning: Tuning | None = None
) -> Price:
    """Seconds and spread of each region on a device; `tuning` counts for its own device alone."""
    tuning = tuning or tuning_of_environment()
    seconds, sigma = np.zeros((2, len(regions)))
    for rows in _batches(regions.is_written):
        part = regions.take(rows)
        made, sort = kernels_of(device, part), sort_of(device, part)
        members, scale = networks(sort) if learned else ((), np.ones(2))
        kernels, which = part, np.arange(len(part))
        if made is not None:  # many regions share kernels: each is priced once
            first, which = distinct(made.regions)
            kernels = made.regions.take(first)
        given, spread = formula_of(device, kernels), _formula_sigma(device, sort)
        price = Price(given.seconds, np.full(len(kernels), spread))
        if members:
            seen = features(device, kernels, given)
            answers = [answer(weights, kernels, seen) for weights in members]
            price = _corrected(given.seconds, answers, scale[np.where(_knows_own(kernels), 0, 1)])
            if device.name != _TRAINED[sort]:
                price = Price(price.seconds, portable.hypot(price.sigma, _ELSEWHERE))
        if made is not None:
            took = np.where(made.known > 0, made.known, price.seconds[which])
            took = took if members else price.seconds[which]
            product = given.parts["product"][which]
            took = np.where(made.library & (product > 0), product, took)  # a library's own time
            price = _sum_kernels(made.of, took, price.sigma[which], len(part))
            price = price if members else Price(price.seconds, np.full(len(part), spread))
        if tuning is not None and tuning.device == device.name:
            factors = np.array([tuning.factors[k] for k in TUNED_KINDS])
            times = portable.exp(portable.product(cost_shares(part, device), factors))
            price = Price(price.seconds * times, np.full(len(part), tuning.sigma))
        seconds[rows], sigma[rows] = price
    return Price(seconds, sigma)


def _batches(written: Flags) -> Iterator[Whole]:
    """Rows to ask together: not too many, and regions apart from kernels as written."""
    for sort in (False, True):
        rows = np.flatnonzero(written == sort)
        yield from (rows[at : at + _CHUNK] for at in range(0, len(rows), _CHUNK))


def _formula_sigma(device: Device, sort: str) -> float:
    found = constants_by_sort()[sort]["sigma"]
    fitted = device.name == found["fitted_on"]
    return float(found["seen"] if fitted else portable.hypot(found["seen"], _ELSEWHERE))


def _sum_kernels(of: Whole, seconds: Array, sigma: Array, count: int) -> Price:
    """Prices of regions from those of their kernels."""
    total = np.asarray(np.bincount(of, seconds, count), float)
    square = np.bincount(of, (seconds * sigma) ** 2, count)
    return Price(total, np.sqrt(square) / np.maximum(total, 1e-12))


def _corrected(formula: Array, answers: list[tuple[Floats, Floats]], scale: Array) -> Price:
    """The formula, corrected by the mean of the networks."""
    middle = np.mean([m for m, _ in answers], axis=0)
    inside = np.mean([s for _, s in answers], axis=0)
    return Price(formula * portable.exp(middle.astype(float)), (inside * scale).astype(float))


def _knows_own(regions: Regions) -> Flags:
    """Regions whose every op has a time of its own."""
    op = KIND_CODE[regions.op] != KINDS.index("input")
    missing = np.bincount(regions.region, op & np.isnan(regions.seconds), len(regions))
    return np.asarray(missing == 0)


def cost_shares(regions: Regions, device: Device) -> Array:
    """The share of each kind of cost in a region's formula, and its kernels as a logarithm."""
    made, count = kernels_of(device, regions), len(regions)
    given = formula_of(device, regions if made is None else made.regions)
    parts, kernels = given.parts, given.walk.region[:, WALKED.index("kernels")]
    if made is not None:
        ready = made.library & (parts["product"] > 0)
        for name in _TERMS[:-1]:
            parts[name] = np.where(ready, 0.0, parts[name])
        parts = {n: np.bincount(made.of, parts[n], count).astype(float) for n in _TERMS}
        kernels = np.bincount(made.of, minlength=count).astype(float)
    total = np.sum([parts[name] for name in _TERMS], axis=0)
    many = portable.log(np.maximum(kernels, 1.0))
    return np.stack([*(parts[name] / total for name in _TERMS), many], axis=1)


@cache
def load(path: Path) -> Tuning:
    """The tuning in a file that `foretell bench --fused` wrote."""
    try:
        found = read_toml(path)
        factors = {name: float(found["factors"][name]) for name in TUNED_KINDS}
        return Tuning(found["device"], factors, float(found["sigma"]), int(found["readings"]))
    except (KeyError, TypeError, ValueError) as why:  # TOML's own error is a ValueError
        raise InputError(
            f"cannot read corrections of fused ops from `{path}`: {why}",
            hint="`foretell bench --fused` writes such a file",
        ) from None


def tuning_of_environment() -> Tuning | None:
    """The tuning that the environment names."""
    path = os.environ.get(VARIABLE)
    return load(Path(path)) if path else None


# The formula.


@cache
def constants_by_sort() -> dict[str, dict[str, Any]]:
    """Constants and spreads by sort: `gpu`, `kernel` (as the compiler wrote it) and `cpu`."""
    tables = files("foretell.cost").joinpath("tables")
    gpu, cpu = (tables.joinpath(n).read_text("utf-8") for n in ("fused.toml", "fused_host.toml"))
    return tomllib.loads(gpu) | {"cpu": tomllib.loads(cpu)}


@cache
def weights(sort: str) -> Array:
    """Elementary operations of one place by op: fitted where measured often, else guessed."""
    fitted, guesses = constants_by_sort()[sort]["weights"], HOST_WEIGHT if sort == "cpu" else WEIGHT
    return np.array([fitted.get(word, guess) for word, guess in zip(WORDS, guesses, strict=True)])


def kind_of_device(device: Device) -> str:
    """Whether a device is a `gpu` or a `cpu`."""
    return "cpu" if device.vendor == "cpu" or device.arch == "x86" else "gpu"


def sort_of(device: Device, regions: Regions) -> str:
    """Which constants regions take: those of their device, or of kernels written for it."""
    kind = kind_of_device(device)
    as_written = len(regions) and regions.is_written.all() and not regions.lowered
    return "kernel" if kind == "gpu" and as_written else kind


def kernels_of(device: Device, regions: Regions) -> Lowered | None:
    """The kernels a GPU's compiler would make of regions; none where they are kernels already."""
    if kind_of_device(device) == "cpu" or regions.is_written.all():
        return None
    return lowered(regions, float(device.units))


class Formula(NamedTuple):
    """What kernels, or on a CPU regions, move and compute, the formula's terms and their sum."""

    walk: Walk
    parts: dict[str, Array]
    seconds: Array


def formula_of(device: Device, regions: Regions) -> Formula:
    """The formula's answer for kernels, or for a CPU's regions."""
    sort = sort_of(device, regions)
    c, by_op = constants_by_sort()[sort]["constants"], weights(sort)
    if sort == "cpu":
        walk = nested(regions, by_op)
        parts = host_terms(device, dict(zip(NESTED, walk.region.T, strict=True)), c)
    else:
        walk = walked(regions, float(device.units), by_op)
        parts = terms(device, dict(zip(WALKED, walk.region.T, strict=True)), c)
    return Formula(walk, parts, total_seconds(parts, c, sort == "cpu"))


def terms(device: Device, w: Mapping[str, Array], c: Constants) -> dict[str, Array]:
    """The terms of the formula, in seconds, from what a walk found by name."""
    cycles, l2 = device.units * device.clock, device.l2
    stream = device.memory_bandwidth * c["stream"]
    demand = np.stack([
        (w["fresh"] + 0.5 * w["written"]) / (c["keep"] * l2),
        (w["written"] + 0.5 * w["fresh"]) / (c["keep_written"] * l2),
        (w["read"] + w["written"]) / (c["again"] * l2),
    ])  # fmt: skip
    missed = 1 - 1 / (1 + portable.power(demand, c["steep"]))  # shares that the cache does not hold
    fresh, written, again = missed * np.stack([w["fresh"], w["written"], w["reread"]])
    cold = (w["read"] - w["fresh"]) + fresh + written + again + c["turned"] * w["turned"]
    moved = w["read"] + w["written"] + w["reread"]
    both = portable.power(np.stack([cold / stream, moved / (stream * c["cache"])]), c["join"])
    ramp = 1 - portable.exp(-moved / (c["ramp"] * l2))
    memory = device.floor * c["latency"] * ramp + portable.power(both[0] + both[1], 1 / c["join"])
    work = w["work"] + c["half"] * w["halves"] + c["odd"] * w["odd"]
    start = device.floor * c["start"] * (1 + c["more"] * (np.maximum(w["kernels"], 1.0) - 1))
    dtype = "bf16" if "bf16" in device.flops else "fp32"
    roofline = w["product"] / (device.peak(dtype) * c["peak"]) + w["operand"] / stream
    guessed = np.where(w["product"] > 0, roofline + device.floor, 0.0)
    return {
        "start": np.where(w["kernels"] > 0, start, 0.0),
        "memory": memory + 1e-12,
        "compute": np.maximum(work / (cycles * c["rate"]), 1e-12),
        "lone": np.maximum(w["lone"] * c["lone"] / device.clock, 1e-12),
        "product": np.where(w["own"] > 0, w["own"], guessed),
    }


def host_terms(device: Device, w: Mapping[str, Any], c: Constants) -> dict[str, Any]:
    """A CPU's terms, in seconds: of arrays, or of tensors while a fit asks."""
    power = portable.power if isinstance(w["read"], np.ndarray) else pow
    cycles, stream = device.units * device.clock, device.memory_bandwidth * c["stream"]
    held, each = w["read"] + w["written"], []
    for size in (w["fresh"] + 0.5 * w["written"], held):  # a byte against one from memory
        own, last = (
            1 - 1 / (1 + power((size + 1) / kept, c["steep"]))
            for kept in (_OWN * device.units, c["keep"] * device.l2)
        )
        each.append(c["near"] + (c["mid"] - c["near"]) * own + (1 - c["mid"]) * last)
    fresh, again = w["fresh"] * each[0], w["reread"] * each[1]
    moved = w["read"] - w["fresh"] + fresh + again + c["store"] * w["written"]
    moved = moved + c["turned"] * w["turned"] + c["mapped"] * w["mapped"]
    ramp = held / (held + c["ramp"] * device.l2)
    work = w["work"] + c["half"] * w["halves"] + c["odd"] * w["odd"]
    work = work + c["columns"] * w["columns"] + c["chained"] * w["chained"]
    work = work + c["asked"] * w["asked"] + c["told"] * w["told"] + c["joined"] * w["joined"]
    start = c["start"] + c["more"] * (w["kernels"] - 1) + c["given"] * w["given"]
    roofline = w["product"] / (device.peak("fp32") * PEAK) + w["operand"] / stream
    unknown = (w["product"] > 0) * (w["own"] <= 0)
    return {
        "start": device.floor * start,
        "memory": device.floor * c["latency"] * ramp + moved / stream,
        "compute": work / (cycles * c["rate"]) + 1e-12,
        "lone": w["lone"] * c["row"] / cycles + 1e-12,
        "product": w["own"] + unknown * (roofline + device.floor),
    }


def total_seconds(parts: Mapping[str, Any], c: Constants, is_host: bool) -> Any:
    """Seconds from the terms; a CPU's long reductions are part of what it computes."""
    power = portable.power if isinstance(parts["memory"], np.ndarray) else pow
    busy = [parts["memory"], parts["compute"], parts["lone"]]
    busy = [busy[0], busy[1] + busy[2]] if is_host else busy
    p = c["overlap"]
    return parts["start"] + power(sum(power(one, p) for one in busy), 1 / p) + parts["product"]


# What the network sees.


_POINTS = 1024.0  # places of a block without reductions
_ROW, _COLUMN = 1024, 64  # longest reductions held in one block: along rows, down columns
_HELD = 4096  # places of a block that holds its rows
_MANY, _MOST, _FEWER = 10, 2048.0, 1024.0  # loads that spare registers; places of a row in a block
_LANES = 2048.0  # threads a unit holds
_ALIGNED = 32  # elements: rows of so many fit the widest load
_CODE = {kind: number for number, kind in enumerate(KINDS)}
NODE_FEATURES, EDGE_FEATURES = 29, 5


class Blocks(NamedTuple):
    """Of each kernel: programs, turns of their loop, and places visited for each that counts."""

    programs: Array
    turns: Array
    padded: Array
    held: Flags


def blocks(rows: Array, inner: Array, down: Flags, loads: Array) -> Blocks:
    """Of kernels with so many results of `inner` places each; `loads` counts what enters."""
    x, r = portable.two_above(np.maximum(np.stack([rows, inner]), 1.0))
    held = (inner > 1) & np.where(down, r <= _COLUMN, r <= _ROW)
    # along rows
    several = np.where(x // 8 < 128, 1.0, np.minimum(_ROW // r, 8.0))
    most = np.where((x >= 1024) & (loads >= _MANY), _FEWER, _MOST)
    wide = np.where(held, np.where(r >= 256, several, 8.0), np.where(r <= 2048, 2.0, 1.0))
    long = np.where(held, r, np.minimum(r, most))
    # down columns
    few, some, heavy = x <= 1024, x // 4096 <= 8, (loads >= 4) & (r > 128)
    many = np.clip(x // 4096, 64.0, 256.0)
    broad = np.select([few, some, heavy], [np.clip(x // 128, 2.0, 8.0), 16.0, 32.0], many)
    rest = np.where(heavy, np.where(r >= 2048, 64.0, 32.0), 512.0 // many)
    deep = np.select([few, some], [np.minimum(r, 64.0), 32.0], rest)
    kept = np.select([b * r <= _HELD for b in (128.0, 32.0, 8.0)], [128.0, 32.0, 8.0], 1.0)
    wide = np.where(down, np.where(held, np.minimum(kept, x), broad), wide)
    long = np.where(down, np.where(held, r, deep), long)
    wide = np.minimum(np.where(inner > 1, wide, _POINTS), x)
    long = np.minimum(np.where(inner > 1, long, 1.0), r)
    programs, turns = np.ceil(rows / wide), np.ceil(inner / long)
    padded = programs * wide * turns * long / np.maximum(rows * inner, 1.0)
    return Blocks(programs, turns, padded, held)


class Features(NamedTuple):
    """Inputs of the network, and the formula's seconds that its answer scales."""

    op: Whole
    node: Array
    edge: Array
    whole: Array
    formula: Array


class Column(NamedTuple):
    """One feature: values, the logarithm taken of them and its divisor, where it counts."""

    values: Any
    by: str = ""
    over: float = 1.0
    where: Any = 1.0


_LOGARITHMS = {"log": portable.log, "log1p": portable.log1p, "log2": portable.log2}


def features(device: Device, regions: Regions, given: Formula | None = None) -> Features:
    """What the network sees, of all regions at once: logarithms are taken of whole tables."""
    given = given or formula_of(device, regions)
    tables = []
    for columns in (
        _node_columns(device, regions, given),
        _edge_columns(regions),
        [*_whole_columns(device, regions, given), *_cut_columns(device, regions, given)],
    ):
        found = np.array([column.values for column in columns], float)
        for name, logarithm in _LOGARITHMS.items():
            rows = [k for k, column in enumerate(columns) if column.by == name]
            if rows:
                found[rows] = logarithm(found[rows])
        for row, column in zip(found, columns, strict=True):
            row /= column.over
            row *= column.where
        tables.append(np.ascontiguousarray(found.T))
    node, edge, whole = tables
    return Features(regions.op, node, edge, whole, given.seconds)


def _size(values: Array, over: float = 1.0, where: Any = 1.0) -> Column:
    """A size, which may be zero."""
    return Column(np.maximum(values, 2.0**-20), "log2", 4 * over, where)


def _low_bit(extent: Array) -> Whole:
    """How wide a load fits a row: 1 for odd ones, 32 at most."""
    whole = np.maximum(extent, 1.0).astype(np.int64)
    return np.asarray(np.minimum(whole & -whole, _ALIGNED))


def _node_columns(device: Device, regions: Regions, given: Formula) -> list[Column]:
    """One row a node."""
    formula, visits = given.seconds[regions.region], given.walk.node.T
    size, lanes, l2 = SIZE[regions.dtype], device.units * _LANES, device.l2
    own = regions.seconds / formula
    inner, kind = np.maximum(regions.inner, 1.0), KIND_CODE[regions.op]
    known = ~np.isnan(own) & (own > 0)
    stream = regions.elements * size / (device.memory_bandwidth * formula)
    # how much was touched since each entering tensor was, against the cache; 1 for never
    since = np.zeros(len(kind)) if regions.since is None else regions.since
    return [
        _size(regions.elements * size / l2),
        _size(regions.looped / lanes),
        _size(regions.inner, 2),
        _size(regions.looped / inner / lanes),
        _size(regions.last, 2),
        _size(regions.writes / l2, where=regions.writes > 0),
        Column(regions.writes > 0),
        Column(np.where(known, np.maximum(own, 1e-4), 1.0), "log"),
        Column(known),
        Column(np.maximum(stream, 1e-5), "log", 2),
        Column(weights(sort_of(device, regions))[regions.op], "log", 2),
        Column(visits[0], over=2),
        Column(visits[1], over=2),
        Column(visits[2]),
        Column(_low_bit(regions.last), "log2", 5),
        Column(_low_bit(regions.inner), "log2", 5),
        Column(portable.two_above(inner) / inner, "log2"),
        Column(regions.inner > 1024),
        *(Column(regions.across == a) for a in (1, 2)),
        *(Column(size == s) for s in (1.0, 2.0, 8.0)),
        *(Column(kind == _CODE[k]) for k in ("input", "pointwise", "view", "norm", "reduction")),
        Column(np.minimum(since / l2, 4.0), over=4),
    ]


def _edge_columns(regions: Regions) -> list[Column]:
    """One row an edge."""
    source, target = regions.source, regions.target
    ratio = regions.elements[source] / np.maximum(regions.looped[target], 1.0)
    same = regions.dtype[source] == regions.dtype[target]
    return [*(Column(regions.pattern == p) for p in range(3)), _size(ratio, 4), Column(same)]


def _whole_columns(device: Device, regions: Regions, given: Formula) -> list[Column]:
    """One row a region."""
    formula, is_host = given.seconds, given.walk.region.shape[1] == len(NESTED)
    w = dict(zip(NESTED if is_host else WALKED, given.walk.region.T, strict=True))
    region, count, l2 = regions.region, len(regions), device.l2
    own = np.bincount(region, np.nan_to_num(regions.seconds), count)
    unknown = np.isnan(regions.seconds) & (KIND_CODE[regions.op] != 0)
    known = (np.bincount(region, unknown, count) == 0) & (own > 0)
    places = np.maximum(w["places"], 1.0)
    found = [
        Column(formula / device.floor, "log"),
        *(Column(np.maximum(given.parts[name] / formula, 1e-3), "log", 2) for name in _TERMS),
        *(
            Column(16 * w[n] / l2, "log1p")
            for n in ("read", "fresh", "reread", "written", "turned")
        ),
        _size(w["places"] / (device.units * _LANES)),
        Column(w["lone"], "log1p", 4),
        Column(w["kernels"], over=4),
        Column(w["levels"], over=2),
        Column(w["random"] / places),
        Column(w["odd"] / places),
        Column(w["halves"] / places, over=4),
        Column(np.maximum(w["work"] / places, 0.5), "log", 2),
        Column(np.where(known, np.maximum(own / formula, 1e-3), 1.0), "log"),
        Column(known),
        *(
            Column(np.bincount(region, KIND_CODE[regions.op] == k, count), "log1p")
            for k in range(len(KINDS))
        ),
        Column(np.bincount(region, regions.writes > 0, count), over=4),
    ]
    if is_host:  # what a CPU's loop nests have besides, against the places they visit
        names = ("columns", "chained", "asked", "told", "joined")
        found += [Column(w[name] / places, "log1p") for name in names]
        found += [Column(16 * w["lone"] / places, "log1p"), Column(w["given"], "log1p")]
    return found


def _cut_columns(device: Device, regions: Regions, given: Formula) -> list[Column]:
    """Of each region's longest reduction length, rows, padding, whether it is turned; what enters.

    Of a kernel besides how that reduction is cut into blocks.
    """
    is_host = given.walk.region.shape[1] == len(NESTED)
    if not is_host and not regions.is_written.all():
        return []
    count, region, lanes = len(regions), regions.region, device.units * _LANES
    order = np.lexsort((regions.looped, regions.inner, region))
    at = order[regions.first[1:] - 1]  # the last of each region in that order
    inner, looped, turned = regions.inner[at], regions.looped[at], regions.across[at] > 0
    least = np.maximum(inner, 1.0)
    enters = KIND_CODE[regions.op] == _CODE["input"]
    most = np.maximum.reduceat(np.where(enters, regions.elements, 0.0), regions.first[:-1])
    large = enters & (regions.elements * 4 >= most[region])
    # how wide loads fit the narrowest large tensor, and the shortest row of one
    narrow, short = (
        np.minimum.reduceat(np.where(large, one, other), regions.first[:-1])
        for one, other in ((_low_bit(regions.last), _ALIGNED), (regions.last, 2.0**30))
    )
    found = [
        _size(inner),
        _size(looped / least / lanes, where=inner > 1),
        Column(portable.two_above(least) / least, "log2"),
        Column(inner > 1024),
        Column(turned),
        Column(np.clip(inner, 1.0, 1024.0), "log2", 10),
        Column(narrow, "log2", 5),
        Column(np.bincount(region, large, count), over=4),
        _size(short),
    ]
    if is_host:
        return found
    rows = np.where(inner > 1, looped / least, given.walk.region[:, WALKED.index("places")])
    loads = np.bincount(region, enters | ((regions.inner > 1) & ~enters), count).astype(float)
    made = blocks(rows, inner, turned, loads)
    waves = made.programs / device.units
    filled = np.where(waves > 1, np.ceil(waves) / np.maximum(waves, 1.0), 1.0)
    return [
        Column(np.ones(count)),
        *found,
        _size(waves),
        Column(made.turns, "log2", 4),
        Column(np.maximum(made.padded, 1.0), "log2"),
        Column(made.held),
        Column(filled),
        Column(np.maximum(made.turns * loads, 1.0), "log2", 4),
    ]


# The network's answer.


@cache
def networks(sort: str = "gpu") -> tuple[tuple[Weights, ...], Array]:
    """The shipped networks of a sort, and the factors their spreads take: own times known, not."""
    path = files("foretell.cost").joinpath("tables", _FILES.get(sort, "none"))
    if not path.is_file():
        return (), np.ones(2)
    with np.load(BytesIO(path.read_bytes())) as arrays:
        order = {str(word): row for row, word in enumerate(arrays["words"])}
        rows = [order.get(word, order["other"]) for word in WORDS]
        found: dict[str, dict[str, Floats]] = {}
        for name in arrays.files:
            member, _, part = name.partition("/")
            if part:
                values = arrays[name].astype(np.float32)
                found.setdefault(member, {})[part] = values[rows] if part == "op" else values
        return tuple(found[member] for member in sorted(found)), arrays["scale"].astype(float)


def answer(weights: Weights, regions: Regions, given: Features) -> tuple[Floats, Floats]:
    """Mean and spread of ln(measured/formula) for each region, by one network."""
    node, whole = (
        _scaled(weights, n, t) for n, t in (("node", given.node), ("whole", given.whole))
    )
    edge, first = given.edge.astype(np.float32), regions.first
    h = _layer(weights, "enter", np.concatenate([weights["op"][given.op], node], axis=1))
    for layer in range(sum(n.startswith("join") and n.endswith("weight") for n in weights)):
        h = h + _layer(weights, f"join{layer}", _messages(weights, layer, h, edge, regions))
    total = np.add.reduceat(h, first[:-1], axis=0)  # pooled: sum (in tens), mean and largest
    many = np.diff(first)[:, None].astype(np.float32)
    most = np.maximum.reduceat(h, first[:-1], axis=0)
    x = np.concatenate([total / 10, total / many, most, whole], axis=1)
    for name in ("first", "second"):
        x = _layer(weights, name, x)
    out = dense(x, weights["out.weight"], weights["out.bias"])
    return out[:, 0], portable.exp(np.clip(out[:, 1], -5.0, 1.0)).astype(np.float32)


def _layer(weights: Weights, name: str, x: Floats) -> Floats:
    return np.maximum(dense(x, weights[f"{name}.weight"], weights[f"{name}.bias"]), 0)


def _messages(weights: Weights, layer: int, h: Floats, edge: Floats, regions: Regions) -> Floats:
    """What each node is and hears from its neighbours on both sides."""
    edges = dense(edge, weights[f"edge{layer}.weight"])
    parts = [h]
    for way, near, far in (
        ("down", regions.source, regions.target),
        ("up", regions.target, regions.source),
    ):
        sent = dense(h, weights[f"{way}{layer}.weight"])
        mean, most = np.zeros((2, len(h), sent.shape[1]), np.float32)
        _gather(sent, edges, near, far, mean, most)
        parts += [mean, most]
    return np.concatenate(parts, axis=1)


@compiled
def _gather(sent: H2, edges: H2, near: I1, far: I1, mean: H2, most: H2) -> None:
    """Mean and largest of the messages to each node, from the near to the far end of each edge."""
    count = np.zeros(len(mean), np.float32)
    for e in range(len(near)):
        count[far[e]] += 1
        for k in range(sent.shape[1]):
            message = max(sent[near[e], k] + edges[e, k], np.float32(0))
            mean[far[e], k] += message
            most[far[e], k] = max(most[far[e], k], message)
    for n in range(len(mean)):
        if count[n] > 0:
            for k in range(sent.shape[1]):
                mean[n, k] /= count[n]


def _scaled(weights: Weights, name: str, values: Array) -> Floats:
    mean = weights[f"{name}.mean"]  # features newer than the network come last: not used
    given = (values[:, : len(mean)].astype(np.float32) - mean) / weights[f"{name}.std"]
    return np.asarray(np.clip(given, -6.0, 6.0), np.float32)
