"""matmuls of the shipped networks: single precision, summed in one order everywhere."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretell.compiled import H2, compiled

Floats = npt.NDArray[np.float32]


def dense(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:
    """What a layer makes of [..., in]: weights are [out, in]."""
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
    out = np.zeros((len(rows), len(weight)), np.float32)
    _add(rows, np.ascontiguousarray(weight.T, np.float32), out)
    if bias is not None:
        out += bias
    return out.reshape(*x.shape[:-1], len(weight))


@compiled
def _add(x: H2, weight: H2, out: H2) -> None:
    """out += x · weight, the inner dimension first to last."""
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            one = x[i, k]
            if one != 0:
                for j in range(out.shape[1]):
                    out[i, j] += one * weight[k, j]
