"""What the host spends to issue operators: Python, dispatch, autograd and the launch.

A host task whose shape says what it issues can be priced on any device's host:

    direction   fwd or bwd           kernels   launched by the operator; 0 for a view
    modules     nn.Modules entered   nodes     autograd nodes entered
    tensors     of a list operator   update    1 in the optimizer, where gradients are off

    seconds = step · (modules·module + nodes·node + own cost of the operator + tensors·each)

Constants and their sources stand in `host.toml`. A host is as fast as its launches: another
device's numbers are scaled by its `launch`. Two machines of one kind differ by 20 to 25 %.

A workload's description counts kernels, not calls: `issued` is what one of them costs with its
share of modules, views and autograd nodes, `updated` what an optimizer's step does.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from foretell.cost import shape as shapes
from foretell.cost.price import Work
from foretell.cost.shape import is_call
from foretell.graph.columns import Array, Kind, Source

# Classes of kernels that cost the host what another does.
_ALIKE = {"conv_wgrad": "conv", "conv_dgrad": "conv", "rms_norm": "norm"}


@cache
def constants() -> dict[str, Any]:
    """The tables of `host.toml`."""
    text = files("foretell.cost").joinpath("host.toml").read_text("utf-8")
    return tomllib.loads(text)


class HostCalls:
    """Prices host tasks that say what they issue; passes all others."""

    name = "host calls"
    source = Source.FORMULA

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = np.full(len(work), np.nan), np.zeros(len(work))
        chain = constants()["chain"]
        for r in np.flatnonzero(work.kind == Kind.HOST).tolist():
            if work.shape[r]:
                launch = work.cluster.devices[int(work.rank[r])].launch
                seconds[r] = _issuing(work, r) * launch / chain["launch"]
                sigma[r] = chain["spread"]
        return seconds, sigma


def _issuing(work: Work, r: int) -> float:
    """What a task that issues something takes, or an operator on tensors of the host."""
    if is_call(work.shape[r]):
        chain = constants()["chain"]
        return float(chain["step"] * chain["on_host"])
    return host_seconds(work.op[r], dict(shapes.parse(work.shape[r])))


def host_seconds(op: str, sizes: dict[str, float]) -> float:
    """What issuing an operator takes on the host the constants are from."""
    own, chain = _own(op, sizes), constants()["chain"]
    if sizes.get("update"):  # read off whole optimizer steps
        return own
    entered = sizes.get("modules", 0.0) * chain["module"] + sizes.get("nodes", 0.0) * chain["node"]
    return float(chain["step"] * (entered + own))


def _own(op: str, sizes: dict[str, float]) -> float:
    way, chain, own = int(sizes.get("direction", 0.0) > 0), constants()["chain"], constants()["own"]
    tensors, launched = sizes.get("tensors", 0.0), sizes.get("kernels", 0.0)
    if tensors:
        each = chain["fused" if op.startswith("_fused") else "list"]
        return float(chain["kernel"][0] + tensors * each)
    if not launched:
        return float(chain["on_host"] if sizes.get("update") else chain["view"][way])
    further = chain["further"] * (launched - 1)
    if op in own:
        return float(own[op][way] + further)
    return float(chain["update"] if sizes.get("update") else chain["kernel"][way] + further)


def issued(op: str, is_backward: bool) -> float:
    """Seconds to issue one kernel of a class, with all that PyTorch does around it."""
    return float(constants()["kinds"][kind_of(op)][is_backward])


def kind_of(op: str) -> str:
    """The kind of kernel under which a class is counted."""
    plain = op.removesuffix("_backward")
    plain = _ALIKE.get(plain, plain)
    return plain if plain in constants()["kinds"] else "other"


def updated(optimizer: str, how: str, tensors: Array, scaled: bool) -> Array:
    """Seconds of an optimizer's step over so many tensors; `scaled` behind a gradient scaler."""
    table = constants()["update"]
    start, each = table[f"{optimizer}-{how}"]
    found: Array = start + (table["scaler"][0] if scaled else 0.0) + each * tensors
    return found
