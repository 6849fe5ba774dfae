"""How PyTorch's own kernels walk over memory, told from their names, and what that does to formats.

A kernel that takes several numbers at a time lasts as long as its bytes; one that works out an
offset for every number (a broadcast, a turned tensor) or adds along an axis hardly cares how wide
they are. What the tables say of a plain pass is taken to a power: 1 for the first, little for the
others. From four models traced with and without autocast on an H200 (benchmarks/measured/h200 and
its folder `half`): of kernels above 10 µs, indexed 0.80 to 0.96 of their time in fp32, reductions
0.82 to 0.91, fills 0.71, a softmax of long rows 0.59 to 0.67, the rest 0.48 to 0.52.
"""

from __future__ import annotations

import re

import numpy as np

from foretell.graph.columns import Array
from foretell.graph.graph import Graph

POWERS = (
    (re.compile(r"(?<!vectorized_)(?<!unrolled_)elementwise_kernel<"), 0.2),
    (re.compile(r"reduce_kernel<"), 0.2),
    (re.compile(r"FillFunctor"), 0.5),
    (re.compile(r"SoftMaxForward|CatArray"), 0.65),
    (re.compile(r"upsample_"), 0.0),
)
MIXED = 1.45  # times its fp32 time: a pass that reads both formats casts number by number


def powers(graph: Graph, tasks: Array) -> Array:
    """For each kernel the power of a plain pass's ratio that it follows."""
    unique, place = np.unique(graph.name[tasks], return_inverse=True)
    table = np.array([_power(graph.names[int(k)]) for k in unique], float)
    found: Array = table[place.reshape(-1)]
    return found


def _power(name: str) -> float:
    return next((power for pattern, power in POWERS if pattern.search(name)), 1.0)
