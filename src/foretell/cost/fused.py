"""What a fused op costs: seconds and spread of thousands of regions at once.

    price = fused_price(regions, device)
    price.seconds, price.sigma

Asked in this order: the network trained on measured regions (→ `foretell.cost.fused_net`), which
corrects the formula, and the formula alone (→ `foretell.cost.fused_formula`) where no network
ships for the kind of device or the caller wants none. `sigma` is the spread of ln(real/priced):
exp(±1.2816 · sigma) holds 80 %. On a device the network was not trained on, what it sees are ratios
to that device's rates and sigma is the formula's own on devices it was not fitted to, if larger.

A region is columns, see `foretell.cost.fused_regions`; which ops may share one is told by
`foretell.cost.fusion_class`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cluster.device import Device
from foretell.cost import fused_formula
from foretell.cost.fused_features import Features, features
from foretell.cost.fused_net import Weights, answer
from foretell.cost.fused_regions import Regions
from foretell.cost.fusion_class import KIND_CODE, KINDS, WORDS
from foretell.cost.kernel import Price

Array = npt.NDArray[np.float64]
_TRAINED = "h200"
_CHUNK = 4096  # regions answered at once, to keep what is held small
# How much wider the spread is on a GPU nobody measured fused regions on: what the kernel formula
# shows between devices it was fitted to and others (`tables/kernel.toml`, sigma, elementwise).
_ELSEWHERE = 0.12


@cache
def networks() -> tuple[tuple[Weights, ...], Array]:
    """The shipped networks, and the factors their spreads take with own times known and not."""
    path = files("foretell.cost").joinpath("tables", "fused_net.npz")
    if not path.is_file():
        return (), np.ones(2)
    with np.load(BytesIO(path.read_bytes())) as arrays:
        members = sorted({n.partition("/")[0] for n in arrays.files} - {"scale", "words"})
        found = tuple(_member(arrays, member) for member in members)
        return found, arrays["scale"].astype(float)


def _member(arrays: Mapping[str, npt.NDArray[Any]], member: str) -> Weights:
    mine = [name for name in arrays if name.startswith(f"{member}/")]
    found = {name.partition("/")[2]: arrays[name].astype(np.float32) for name in mine}
    order = {str(word): row for row, word in enumerate(arrays["words"])}
    return found | {"op": found["op"][[order.get(w, order["other"]) for w in WORDS]]}


def fused_price(regions: Regions, device: Device, *, learned: bool = True) -> Price:
    """Seconds and spread of each region on a device."""
    parts = [
        _price(regions.take(np.arange(at, min(at + _CHUNK, len(regions)))), device, learned)
        for at in range(0, len(regions), _CHUNK)
    ]
    if not parts:
        return Price(np.zeros(0), np.zeros(0))
    return Price(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _price(regions: Regions, device: Device, learned: bool) -> Price:
    kind = fused_formula.kind_of_device(device)
    members, scale = networks()
    if not learned or kind != "gpu" or not members:
        seconds = fused_formula.seconds(device, regions)
        return Price(seconds, np.full(len(regions), _formula_sigma(device)))
    return _by_network(regions, device, features(device, regions), members, scale)


def _by_network(
    regions: Regions, device: Device, given: Features, members: tuple[Weights, ...], scale: Array
) -> Price:
    """The formula, corrected by the mean of the networks."""
    told = [answer(weights, regions, given) for weights in members]
    middle = np.mean([m for m, _ in told], axis=0)
    inside = np.mean([s for _, s in told], axis=0)
    sigma = inside * scale[np.where(_knows_own(regions), 0, 1)]
    if device.name != _TRAINED:
        sigma = np.hypot(sigma, _ELSEWHERE)
    return Price(given.formula * np.exp(middle.astype(float)), sigma.astype(float))


def _knows_own(regions: Regions) -> npt.NDArray[np.bool_]:
    """Regions whose every op has a time of its own."""
    op = KIND_CODE[regions.op] != KINDS.index("input")
    missing = np.bincount(regions.region, op & np.isnan(regions.seconds), len(regions))
    return np.asarray(missing == 0)


def _formula_sigma(device: Device) -> float:
    found = fused_formula.shipped()[fused_formula.kind_of_device(device)]["sigma"]
    fitted = device.name == found["fitted_on"]
    return float(found["seen"] if fitted else np.hypot(found["seen"], _ELSEWHERE))
