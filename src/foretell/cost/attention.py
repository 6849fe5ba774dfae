"""Fused attention (flash): softmax(Q·Kᵀ)·V without the scores ever reaching memory.

A block owns `tile` queries of one head and walks the keys they see: all, about half of them where
causal, at most `window` of them. It does 4·tile·keys·d flop forward, 2.5 times that backward (five
matmuls for two), `edge` of a tile on the diagonal where causal, and `ahead` (`behind` in the
backward) keys' worth of work besides: loads before the first product, the gradient of Q summed in
fp32. Blocks go out in
waves like the tiles of a product, at `peak` of what the pipe can do, while each score takes
`scores` cycles of a unit for its exponential and `dropout` more for a random number. Q, K, V and O
move once. Unfused attention is two matmuls and a softmax (→ `foretell.cost.kernel`).

Kernels written for the chip (cuDNN, FlashAttention-3) are what PyTorch and Transformer Engine pick
by default; FlashAttention-2 (`flash2`) keeps Ampere's instructions, which reach a share of a newer
chip's peak. `benchmarks/fit_attention.py` fits both to an H200; on A100 FlashAttention-2 (Dao 2023,
fig. 4-6) reaches 190-220 forward, 170-200 backward of 312 Tflop/s at d = 128.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.cost import gemm
from foretell.cost.limits import Limits

_DEEP = 128.0  # wider heads leave the backward too few registers
Array = npt.NDArray[np.float64]
Fitted = Mapping[str, float]


@dataclass(frozen=True)
class Attention:
    """Attentions as columns of one length; causal, backward and dropout are 0 or 1."""

    b: Array
    heads: Array
    sq: Array
    sk: Array
    d: Array
    causal: Array
    backward: Array
    dropout: Array
    window: Array  # keys a query sees at most; 0: all


def visible(sk: Array | float, causal: Array | float, window: Array | float) -> Array:
    """Keys that a query sees on average: of a causal window w over s, w − w·(w − 1)/2s."""
    size = np.where(np.asarray(window) > 0, np.minimum(window, sk), sk)
    out: Array = np.where(np.asarray(causal) > 0, size - size * (size - 1) / (2 * sk), size)
    return out


def seconds(limits: Limits, product: Fitted, fitted: Fitted, a: Attention) -> Array:
    """Time of each fused attention."""
    is_back = a.backward > 0
    blocks = a.b * a.heads * np.ceil(a.sq / fitted["tile"])
    resident = fitted["resident"]
    turns = np.ceil(blocks / (limits.units * resident))
    rows = turns * limits.units * resident * fitted["tile"]
    seen = visible(a.sk, a.causal, a.window)
    walked = seen + np.where(is_back, fitted["behind"], fitted["ahead"])
    walked = walked + np.where(a.causal > 0, fitted["tile"] * fitted["edge"], 0.0)
    deep = np.maximum(a.d / _DEEP, 1.0) ** fitted["deep"]
    times = np.where(is_back, 2.5 * fitted["backward"] * deep, 1.0)
    work = 4 * rows * walked * np.maximum(a.d, fitted["depth"]) * times
    compute = gemm.throttled(limits, product, work, np.array(limits.peak * fitted["peak"]))
    cycles = (fitted["scores"] + fitted["dropout"] * a.dropout) * np.where(is_back, 2.0, 1.0)
    scores = rows * walked * cycles / (limits.units * limits.clock)
    tensors = a.b * a.heads * a.d * (2 * a.sq + 2 * a.sk) * np.where(is_back, 2.0, 1.0)
    memory = tensors * limits.size / (limits.stream * fitted["bandwidth"])
    busy = gemm.norm(fitted["overlap"], compute, scores, memory)
    out: Array = busy + limits.floor * fitted["launches"] * np.where(is_back, 2.0, 1.0)
    return out
