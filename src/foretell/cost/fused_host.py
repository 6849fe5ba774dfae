"""How long a fused region takes on a CPU, from what its loop nests move and compute.

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
    product   a matmul's own time where known, else its roofline

Plain arithmetic throughout, so that the same lines are fitted on tensors
(`foretell_lab.fused.host_fit`) and answer on arrays. Constants: `tables/fused_host.toml`.

What the loop nests of a fused region must move and compute on a CPU, found by walking its ops.
Inductor C++ (torch 2.13) writes one function of several loop nests. Ops over the same places share
a nest, but what uses a reduction, a norm or a product waits for the next one: the region falls into
passes. What is not stored is recomputed in every pass that uses it; what is long or holds an
exponential is stored then (`should_realize_on_reuse` in torch/_inductor/ir.py). Nests are
vectorized along the rows that lie side by side; sums of columns keep one accumulator each and run
down the rows.

The columns are those of `fused_traffic`, with a CPU's meaning where it differs, and seven more:

    reread    bytes read again by later passes
    kernels   loop nests expected
    levels    passes that wait for one another
    lone      rows begun: the start and the last, partial vector of each
    odd       places that partial vectors visit in vain
    columns   places visited by reductions that run down columns
    chained   places visited by reductions along rows: one accumulator, one after another
    mapped    bytes that leave in blocks larger than the allocator keeps: paged in anew
    asked     booleans read from memory: a mask of them is assembled one by one
    told      booleans written
    joined    places of concatenations that are not stored: what uses them asks which part it is in
    given     tensors that enter and leave: each is passed over by the interpreter
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cluster.node import Device
from foretell.compiled import F2, I1, compiled
from foretell.cost import fused_regions
from foretell.cost.fused_regions import (
    BATCH,
    COLUMNS,
    CONSTANT,
    DTYPES,
    FRESH,
    INPUT,
    NORM,
    RANDOM,
    REDUCTION,
    TEMPLATE,
    VIEW,
    WEIGHT,
    Ops,
    Regions,
    Walk,
    add_work,
    bits,
    columns_of,
    edges_read,
    live,
    rows_matter,
    settle,
)
from foretell.cost.fusion_class import KINDS, WORDS

Array = npt.NDArray[np.float64]
NESTED = (
    "read", "fresh", "reread", "written", "kernels", "levels", "work", "turned", "lone", "product",
    "own", "places", "random", "operand", "odd", "halves", "columns", "chained", "mapped", "asked",
    "told", "joined", "given",
)  # fmt: skip
_PASSES = 12  # more are counted as the last
_LONG = 30.0  # operations beyond which what several passes use is stored (`has_large_inner_fn`)
# Ops whose value is stored where several passes use it, however short it is.
_STORED = np.isin(
    np.array(WORDS),
    ("exp", "log", "log1p", "sigmoid", "tanh", "silu", "silu_backward", "mish", "softplus"),
)
_NESTS = 16  # of a region; more are counted as the last
_CAT = KINDS.index("cat")
_BOOL = DTYPES.index("bool")
_LANES = 16.0  # of fp32 in a vector of 512 bits
_MAPPED = 32.0 * 2**20  # bytes: glibc maps larger blocks anew (mallopt(3), M_MMAP_THRESHOLD)


Constants = Mapping[str, float]
# Elementary operations of one place where a CPU's differ from those of a GPU: random numbers
# and indices go lane by lane.
_LANE_BY_LANE = {
    "dropout": 300.0, "rand": 300.0, "rand_like": 300.0, "bernoulli": 300.0, "randn": 300.0,
    "embedding": 8.0, "index": 30.0, "layer_norm": 6.0, "layer_norm_backward": 6.0,
    "batch_norm": 6.0, "batch_norm_backward": 6.0,
}  # fmt: skip
HOST_WEIGHT = np.array(
    [_LANE_BY_LANE.get(w, g) for w, g in zip(WORDS, fused_regions.WEIGHT, strict=True)]
)
PEAK = 0.6  # share of a product's peak rate that is reached where its own time is unknown
_OWN = 2.0**20  # bytes of cache a core has to itself: Zen 4's second level


def nested(regions: Regions, weight: Array) -> Walk:
    """Walk all regions; `weight` counts operations by op."""
    out, node = np.zeros((len(regions), len(NESTED))), np.zeros((len(regions.op), 3))
    _walk(columns_of(regions, edges_read(regions)), regions.first, out, node)
    add_work(regions, node, weight, out)
    return Walk(out, node)


@compiled
def _walk(o: Ops, first: I1, out: F2, node: F2) -> None:
    for r in range(len(first) - 1):
        low, high = first[r], first[r + 1]
        settle(o, low, high)
        alive = live(o, low, high)
        level, done = _passes(o, low, high, alive)
        long = _lengths(o, low, high)
        need, again = _needs(o, low, high, alive, level, done, long)
        rows = rows_matter(o, low, high, alive)
        row = out[r]
        _entering(o, low, high, alive, need, row)
        _inside(o, low, high, alive, level, done, need, again, rows, row)
        row[4], row[5] = max(row[4], 1.0), max(row[5], 1.0)
        for i in range(high - low):
            node[low + i, 0] = max(1, bits(need[i]) - again[i]) if alive[i] else 0
            node[low + i, 1] = level[i]
            node[low + i, 2] = done[i] - level[i]


@compiled
def _passes(o, low, high, alive):  # type: ignore[no-untyped-def]
    """The pass in which each node is begun, and the one in which its result is there."""
    level = np.zeros(high - low, np.int64)
    done = np.zeros(high - low, np.int64)
    for n in range(low, high):
        i = n - low
        if o.kind[n] != CONSTANT:
            for e in range(o.start[n], o.start[n + 1]):
                level[i] = max(level[i], done[o.source[e] - low])
        waits = o.kind[n] == REDUCTION or o.kind[n] == NORM or o.kind[n] == TEMPLATE
        done[i] = min(level[i] + (1 if waits else 0), _PASSES - 1)
    return level, done


@compiled
def _lengths(o, low, high):  # type: ignore[no-untyped-def]
    """Operations behind each value since the last stored ones; endless behind an exponential."""
    found = np.zeros(high - low)
    for n in range(low, high):
        if o.kind[n] != INPUT and o.kind[n] != CONSTANT:
            found[n - low] = 0.0 if o.kind[n] == VIEW else min(WEIGHT[o.op[n]], 10.0)
            found[n - low] += 1e9 if _STORED[o.op[n]] else 0.0
            for e in range(o.start[n], o.start[n + 1]):
                at = o.source[e]
                lies = o.writes[at] > 0 or o.kind[at] == REDUCTION or o.kind[at] == TEMPLATE
                found[n - low] += 0.0 if lies else found[at - low]
    return found


@compiled
def _needs(o, low, high, alive, level, done, long):  # type: ignore[no-untyped-def]
    """For each node the passes, as asked, in which its value is wanted; in how many it is read."""
    need = np.zeros(high - low, np.int64)
    again = np.zeros(high - low, np.int64)
    for n in range(high - 1, low - 1, -1):
        i = n - low
        if not alive[i] or o.kind[n] == INPUT or o.kind[n] == CONSTANT:
            continue
        if o.writes[n] > 0:
            need[i] |= 1 << done[i]
        asked = need[i]
        if o.kind[n] == TEMPLATE:
            asked = 0
        elif o.kind[n] == REDUCTION:
            asked = 1 << level[i]
        elif o.kind[n] == NORM:
            asked |= 1 << level[i]
        elif o.writes[n] > 0 or (o.kind[n] != VIEW and long[i] > _LONG and bits(asked) > 1):
            again[i] = bits(asked) - 1
            asked = 1 << level[i]
        if COLUMNS[o.op[n]] or (BATCH[o.op[n]] and o.kind[n] == NORM):
            asked |= 1 << (level[i] + _PASSES)  # sums of columns, or a second pass for the variance
        for e in range(o.start[n], o.start[n + 1]):
            need[o.source[e] - low] |= asked
    return need, again


@compiled
def _entering(o, low, high, alive, need, row):  # type: ignore[no-untyped-def]
    """Bytes of entering tensors: as much of each as is read, and again in later passes."""
    asked = np.zeros(high - low)
    for n in range(high - 1, low - 1, -1):
        i = n - low
        if not alive[i] or o.kind[n] == CONSTANT:
            continue
        asked[i] = min(asked[i], o.elements[n])
        for e in range(o.start[n], o.start[n + 1]):
            asked[o.source[e] - low] += asked[i] if o.kind[n] == VIEW else o.looped[n]
        if o.kind[n] == INPUT and need[i] > 0:
            moved = asked[i] * o.size[n]
            row[0] += moved
            row[1] += moved if o.op[n] == FRESH else 0.0
            row[2] += moved * (bits(need[i]) - 1)
            row[19] += asked[i] * bits(need[i]) if o.dtype[n] == _BOOL else 0.0
            row[22] += 1.0


@compiled
def _inside(o, low, high, alive, level, done, need, again, rows, row):  # type: ignore[no-untyped-def]
    seen = np.zeros((_NESTS, 3))
    for n in range(low, high):
        i = n - low
        if not alive[i] or o.kind[n] == INPUT:
            continue
        stored = o.writes[n] > 0 or o.kind[n] == REDUCTION or o.kind[n] == TEMPLATE
        row[3] += o.writes[n]
        row[18] += o.writes[n] if o.writes[n] > _MAPPED else 0.0
        row[20] += o.writes[n] if o.dtype[n] == _BOOL else 0.0
        row[22] += 1.0 if o.writes[n] > 0 else 0.0
        if stored or again[i] > 0:  # later passes read what was stored
            row[2] += o.elements[n] * o.size[n] * bits(need[i] & ~(1 << done[i]))
            row[2] += 0.0 if stored else o.elements[n] * o.size[n]
        if o.kind[n] == TEMPLATE:
            row[9] += o.flops[n]
            row[10] += o.seconds[n] if o.seconds[n] == o.seconds[n] else 0.0
            row[13] += o.elements[n] * o.size[n]
            for e in range(o.start[n], o.start[n + 1]):
                row[13] += o.elements[o.source[e]] * o.size[o.source[e]]
            row[2] += o.elements[n] * o.size[n] if need[i] >> done[i] & 1 else 0.0
        if o.kind[n] == TEMPLATE or o.kind[n] == VIEW or o.kind[n] == CONSTANT:
            continue
        times = max(1, bits(need[i]) - again[i])
        row[11] = max(row[11], o.looped[n])
        row[12] += o.looped[n] * times if o.kind[n] == RANDOM else 0.0
        row[21] += o.looped[n] * times if o.kind[n] == _CAT and o.writes[n] == 0 else 0.0
        for e in range(o.start[n], o.start[n + 1]):
            row[7] += o.elements[o.source[e]] * o.size[o.source[e]] if o.pattern[e] == 2 else 0.0
        if o.kind[n] == REDUCTION or o.kind[n] == NORM:
            along = o.across[n] == 0
            row[17 if along else 16] += o.looped[n]
            row[4] += 1.0 if o.kind[n] == NORM else 0.0  # what is made of the sums of a norm
            length = o.inner[n] if along else o.last[n]
            _nest(level[i], o.looped[n], o.across[n], length, rows, seen, row)
        if o.writes[n] > 0 and o.kind[n] != REDUCTION:
            _nest(done[i], o.looped[n], 0, o.last[n], rows, seen, row)
        row[5] = max(row[5], done[i] + (0.0 if o.kind[n] == REDUCTION else 1.0))


@compiled
def _nest(level, places, across, length, rows, seen, row):  # type: ignore[no-untyped-def]
    """Note a loop nest: once for all that visit the same places in the same pass."""
    for k in range(_NESTS):
        if seen[k, 0] == level + 1 and seen[k, 1] == places and seen[k, 2] == across:
            return
        if seen[k, 0] == 0:
            seen[k, 0], seen[k, 1], seen[k, 2] = level + 1, places, across
            break
    row[4] += 1.0
    if rows and length > 0:
        count = places / length
        row[8] += count
        row[14] += count * (np.ceil(length / _LANES) * _LANES - length)


@cache
def shipped() -> dict[str, Any]:
    """Constants, spread and operations by op."""
    text = files("foretell.cost").joinpath("tables", "fused_host.toml").read_text("utf-8")
    return tomllib.loads(text)


def total(parts: Mapping[str, Any], c: Constants) -> Any:
    """Seconds of each region from its terms."""
    p = c["overlap"]
    computes = _power(parts["compute"] + parts["lone"], p)
    busy = _power(_power(parts["memory"], p) + computes, 1 / p)
    return parts["start"] + busy + parts["product"]


def terms(device: Device, w: Mapping[str, Any], c: Constants) -> dict[str, Any]:
    """The terms of the formula, in seconds."""
    cycles = device.units * device.clock
    work = w["work"] + c["half"] * w["halves"] + c["odd"] * w["odd"]
    work = work + c["columns"] * w["columns"] + c["chained"] * w["chained"]
    work = work + c["asked"] * w["asked"] + c["told"] * w["told"] + c["joined"] * w["joined"]
    start = c["start"] + c["more"] * (w["kernels"] - 1) + c["given"] * w["given"]
    return {
        "start": device.floor * start,
        "memory": _memory(device, w, c),
        "compute": work / (cycles * c["rate"]) + 1e-12,
        "lone": w["lone"] * c["row"] / cycles + 1e-12,
        "product": _product(device, w, c),
    }


def _memory(device: Device, w: Mapping[str, Any], c: Constants) -> Any:
    held = w["read"] + w["written"]
    fresh = w["fresh"] * _level(device, w["fresh"] + 0.5 * w["written"], c)
    again = w["reread"] * _level(device, held, c)
    moved = w["read"] - w["fresh"] + fresh + again + c["store"] * w["written"]
    moved = moved + c["turned"] * w["turned"] + c["mapped"] * w["mapped"]
    ramp = held / (held + c["ramp"] * device.l2)
    return device.floor * c["latency"] * ramp + moved / (device.memory_bandwidth * c["stream"])


def _level(device: Device, size: Any, c: Constants) -> Any:
    """What a byte costs against one from memory, in the cache that holds so many."""
    own = _missed(size, _OWN * device.units, c)
    last = _missed(size, c["keep"] * device.l2, c)
    return c["near"] + (c["mid"] - c["near"]) * own + (1 - c["mid"]) * last


def _missed(size: Any, kept: Any, c: Constants) -> Any:
    return 1 - 1 / (1 + _power((size + 1) / kept, c["steep"]))


def _product(device: Device, w: Mapping[str, Any], c: Constants) -> Any:
    """A product's own time, or its roofline where it is unknown."""
    compute = w["product"] / (device.peak("fp32") * PEAK)
    roofline = compute + w["operand"] / (device.memory_bandwidth * c["stream"])
    unknown = (w["product"] > 0) * (w["own"] <= 0)
    return w["own"] + unknown * (roofline + device.floor)


def _power(x: Any, to: Any) -> Any:
    """Arrays to a power; a fit asks for its own tensors."""
    return portable.power(x, to) if isinstance(x, np.ndarray) else x**to
