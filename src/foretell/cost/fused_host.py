"""How long a fused region takes on a CPU, from what its loop nests move and compute.

    seconds = start + more · (nests − 1) + given + (memoryᵖ + (compute + lone)ᵖ)^(1/p) + product

    given     a share for every tensor that is passed over
    memory    bytes over the bandwidth of one stream: what was evicted comes from memory; what is
              fresh and what later passes read again comes from the cache that holds it (a core's
              own, or the last one); what leaves is fetched before it is written; blocks too large
              for the allocator to keep are paged in
    compute   elementary operations over the vector lanes' rate, more in bf16, in partial vectors
              and in reductions, which wait for their own accumulator; truth values in memory are
              packed and unpacked one by one,
              and what uses a concatenation asks for its part at every place
    lone      rows begun
    product   a matmul's own time where known, else its roofline

Plain arithmetic throughout, so that the same lines are fitted on tensors
(`foretell_lab.fused.host_fit`) and answer on arrays. Constants: `tables/fused_host.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from foretell import portable
from foretell.cluster.device import Device
from foretell.cost import fused_regions
from foretell.cost.fusion_class import WORDS

Constants = Mapping[str, float]

# First guess, least and most of each constant, in the order a fit packs them: shares of the
# device's rates; `start` and `more` of its floor, `row` in cycles.
GUESS = {
    "start": (0.8, 0.1, 4.0), "more": (0.05, 0.001, 1.0), "stream": (0.7, 0.2, 2.0),
    "latency": (0.2, 0.01, 4.0), "ramp": (2e-3, 1e-5, 1e-1), "near": (0.1, 0.02, 0.6),
    "mid": (0.3, 0.05, 0.9), "keep": (0.6, 0.1, 2.0), "steep": (2.0, 1.0, 6.0),
    "store": (1.5, 0.3, 4.0), "turned": (0.4, 0.01, 10.0), "mapped": (2.0, 0.01, 20.0),
    "rate": (8.0, 0.5, 60.0), "half": (0.5, 0.01, 20.0), "odd": (1.0, 0.01, 20.0),
    "asked": (30.0, 0.1, 400.0), "told": (80.0, 0.1, 1000.0), "joined": (8.0, 0.1, 400.0),
    "given": (0.1, 0.001, 1.0),
    "columns": (1.0, 0.01, 40.0), "chained": (2.0, 0.01, 40.0), "row": (10.0, 0.1, 200.0),
    "overlap": (1.6, 1.0, 6.0),
}  # fmt: skip
# Elementary operations of one place where a CPU's differ from those of a GPU: random numbers
# and indices go lane by lane.
_LANE_BY_LANE = {
    "dropout": 300.0, "rand": 300.0, "rand_like": 300.0, "bernoulli": 300.0, "randn": 300.0,
    "embedding": 8.0, "index": 30.0, "layer_norm": 6.0, "layer_norm_backward": 6.0,
    "batch_norm": 6.0, "batch_norm_backward": 6.0,
}  # fmt: skip
WEIGHT = np.array(
    [_LANE_BY_LANE.get(w, g) for w, g in zip(WORDS, fused_regions.WEIGHT, strict=True)]
)
PEAK = 0.6  # share of a product's peak rate that is reached where its own time is unknown
_OWN = 2.0**20  # bytes of cache a core has to itself: Zen 4's second level


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
