"""Where a linear layer is faster with its matmuls in fp8 than in bf16, the casts to it counted.

Asked for the price of a plan and by the ranks that run it, so that both mean the same layers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretell.cluster.node import Device
from foretell.cost import kernel
from foretell.cost.price import issued as host_issued

Array = npt.NDArray[np.float64]
EACH = 16  # what the sizes of an fp8 matmul are multiples of
# bytes at the pace of a copy that bringing one number to fp8 takes, as it lies and turned: compiled
# casts of any size take 5.0 to 6.8 ps a number on an H200 (fp8_layers_h200.json, eight layers)
CAST = 24.0
_WEIGHTS = 6.0  # that autocast moves to bring a weight from fp32 to bf16


def saved(device: Device, rows: npt.ArrayLike, wide: npt.ArrayLike, out: npt.ArrayLike) -> Array:
    """Seconds by which fp8 shortens the forward and backward of a linear layer.

    `rows` of `wide` numbers become rows of `out`; less than 0 where casts take more than matmuls
    gain, on the device or for the host that issues them, and where its sizes are no multiples of
    what the matrix units take.
    """
    sizes = np.broadcast_arrays(*(np.asarray(one, float) for one in (rows, wide, out)))
    n, k, m = (one.ravel() for one in sizes)
    products = ((n, m, k), (n, k, m), (m, k, n))  # output, gradients of input and of weight
    short, wider = (
        sum(_product(device, dtype, *sides) for sides in products) for dtype in ("fp8", "bf16")
    )
    short += _moved(device, n * k, CAST) + _moved(device, n * m, CAST)
    short += _moved(device, k * m, CAST)
    wider += _moved(device, k * m, _WEIGHTS)
    issued = host_issued("gemm", False) + 2 * host_issued("gemm", True)
    casts = 4 * host_issued("compiled_cast", False) + 2 * host_issued("compiled_cast", True)
    gains = np.maximum(wider, issued) - np.maximum(short, issued + casts)
    fits = (k % EACH == 0) & (m % EACH == 0)
    return np.where(fits, gains, -np.inf)


def _product(device: Device, dtype: str, m: Array, n: Array, k: Array) -> Array:
    shape = {"b": np.ones(len(m)), "m": m, "n": n, "k": k}
    return kernel.seconds(device, "gemm", dtype, shape).seconds


def _moved(device: Device, numbers: Array, each: float) -> Array:
    return kernel.seconds(device, "copy", "bf16", {"n": numbers}, bytes=each * numbers).seconds
