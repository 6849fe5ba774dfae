"""Fused attention (flash): softmax(Q·Kᵀ)·V without the scores ever reaching memory.

A block owns `tile` queries of one head and walks the keys: 4·tile·sₖ·d flop forward, 2.5 times that
backward (five products for two), half where causal. Blocks go out in waves like the tiles of a
product, at `peak` of what the pipe can do, while each of the sq·sₖ scores takes `scores` cycles of
a unit for its exponential and `dropout` more for a random number. Q, K, V and O move once.
Unfused attention is two products and a softmax, priced as such (→ `foretell.cost.kernel`).

Long sequences: FlashAttention-2 (Dao 2023, fig. 4-6) forward 190-220, backward 170-200 of 312
Tflop/s on A100 at d = 128; short ones are fitted to the traces of the H200.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.cost import gemm
from foretell.cost.limits import Limits

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Attention:
    """Attentions as columns of one length; the last three are 0 or 1."""

    b: Array
    heads: Array
    sq: Array
    sk: Array
    d: Array
    causal: Array
    backward: Array
    dropout: Array


def seconds(
    limits: Limits, product: Mapping[str, float], fitted: Mapping[str, float], a: Attention
) -> Array:
    """Time of each fused attention."""
    blocks = a.b * a.heads * np.ceil(a.sq / fitted["tile"])
    resident = fitted["resident"]
    whole = np.ceil(blocks / (limits.units * resident))
    turns = np.maximum(whole, blocks / (limits.units * resident))
    seen = a.sk * np.where(
        a.causal > 0, 0.5 + 0.5 * fitted["tile"] / np.maximum(a.sk, fitted["tile"]), 1.0
    )
    times = np.where(a.backward > 0, 2.5 * fitted["backward"], 1.0)
    rows = turns * limits.units * resident * fitted["tile"]
    depth = np.maximum(a.d, fitted["depth"])
    compute = gemm.throttled(
        limits, product, 4 * rows * seen * depth * times, np.array(limits.peak * fitted["peak"])
    )
    cycles = (fitted["scores"] + fitted["dropout"] * a.dropout) * np.where(a.backward > 0, 2.0, 1.0)
    scores = rows * seen * cycles / (limits.units * limits.clock)
    tensors = a.b * a.heads * a.d * (2 * a.sq + 2 * a.sk) * np.where(a.backward > 0, 2.0, 1.0)
    memory = tensors * limits.size / (limits.stream * fitted["bandwidth"])
    busy = gemm.norm(fitted["overlap"], compute, scores, memory)
    start = fitted["launches"] * np.where(a.backward > 0, 2.0, 1.0)
    out: Array = busy + limits.floor * start
    return out
