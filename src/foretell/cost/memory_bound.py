"""Kernels that move more than they compute: time by what they touch.

    stream   bytes / (bandwidth · share), faster where the bytes still lie in the second-level cache
    issue    elements / (units · clock · rate): instructions, not bytes, bound odd strides, small
             formats and transcendental functions
    turns    rows · cycles / (units · clock): ops that give each row to one block pay for every row
    lone     the longest row at one block's pace, for ops that give each channel to one block: few
             channels leave most of the device idle

They overlap as t = (Σ tᵢᵖ)^(1/p) + start. Constants are fitted per class of op (→ `seconds`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell import portable
from foretell.cost.limits import Limits

Array = npt.NDArray[np.float64]


# PyTorch adds up gradients of looked-up rows one by one up to this many and sorts them where more
# were (ATen/native/cuda/Embedding.cu). Where a table has far fewer rows than that, a further one
# then takes a twentieth (embedding rows of `tables/measured/h200.csv.gz`: 2048 in a table of 1024
# 55 µs, 4096 of 2 87 µs, 34624 of 96 131 µs, 65536 of 1000 152 µs).
_ONE_BY_ONE, _FEW, _SORTED = 3072.0, 4.0, 0.05


def added_rows(rows: Any, table: Any) -> Any:
    """Rows that the gradient of a look-up costs, where `rows` were taken from a table."""
    quick = np.minimum(rows, _ONE_BY_ONE) + _SORTED * np.maximum(rows - _ONE_BY_ONE, 0.0)
    return np.where(_FEW * np.asarray(table) < rows, quick, rows)


def seconds(
    limits: Limits,
    shared: Mapping[str, float],
    fitted: Mapping[str, float],
    moved: Array,
    n: Array,
    rows: Array,
    uneven: Array,
) -> Array:
    """Time of each kernel; `moved` bytes over `n` elements in `rows` rows.

    `uneven` is 1 where inputs are broadcast, strided or of mixed formats.
    """
    rate = np.where(uneven > 0, fitted["rate_uneven"], fitted["rate"])
    cycles = limits.units * limits.clock
    rows = np.maximum(rows, 1.0)
    terms = (
        moved / _bandwidth(limits, shared, fitted, moved),
        n / (cycles * rate),
        rows * fitted["cycles_row"] / cycles,
        n / rows * fitted["cycles_lone"] / limits.clock,
    )
    p = shared["overlap"]
    busy = portable.power(sum(portable.power(term, p) for term in terms), 1 / p)
    out: Array = limits.floor * (shared["start"] + fitted["start"]) + busy
    return out


def _bandwidth(
    limits: Limits, shared: Mapping[str, float], fitted: Mapping[str, float], moved: Array
) -> Array:
    kept = 1 / (1 + portable.power(moved / (shared["keep"] * limits.l2), 4.0))
    gain = 1 + (shared["cache"] - 1) * kept
    wide: Array = limits.stream * fitted["bandwidth"] * gain
    return wide
