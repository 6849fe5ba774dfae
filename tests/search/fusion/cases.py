"""Random steps to be fused: ops that read earlier ones, gradients, a wire with start and slope."""

import numpy as np
from hypothesis import strategies as st

from foretell.cluster import load as load_cluster
from foretell.search.fusion.problem import (
    BACKWARD,
    FORWARD,
    Gradient,
    OpNode,
    Problem,
    Wire,
    edges_of,
)

DEVICE = load_cluster("t4").devices[0]
WORDS = ("add", "mul", "gelu", "layer_norm", "sum", "mm", "convolution_backward", "dropout", "relu")
SECONDS = st.floats(1e-6, 1e-3)


def wire(start=5e-5, slope=1e-10):
    return Wire(
        ("ring simple", "ring ll"), np.array([[start, slope, 0.0], [start / 2, 3 * slope, 1e-9]]), 4
    )


@st.composite
def problems(draw, most=24):
    """A step of random ops; half of them forward, gradients from some of the others."""
    n = draw(st.integers(2, most))
    half = n // 2
    ops, rows = [], []
    for i in range(n):
        word = draw(st.sampled_from(WORDS))
        cols = draw(st.sampled_from((64, 256)))
        looped = 1024.0 * cols
        made = float(cols) if word == "sum" else looped
        side = FORWARD if i < half else BACKWARD
        inner = {"layer_norm": float(cols), "sum": 1024.0}.get(word, 1.0)
        ops.append(
            OpNode(
                f"op{i}", word, "fp32", made, looped, draw(SECONDS), 4 * made, side, inner,
                int(word == "sum"), float(cols), kept=draw(st.booleans()) and i > half,
            )
        )  # fmt: skip
        for j in draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []:
            rows.append((j, i, 0))
    makers = draw(st.lists(st.integers(half, n - 1), min_size=1, max_size=8))
    gradients = tuple(
        Gradient(f"p{k}", draw(st.sampled_from((4e3, 1e6, 2.5e7))), i, draw(st.integers(0, n - 1)))
        for k, i in enumerate(makers)
    )
    ops = [o if i not in makers else _kept(o) for i, o in enumerate(ops)]
    return Problem(
        "random", "0" * 16, tuple(ops), *edges_of(rows), gradients, draw(SECONDS), wire(), DEVICE
    )


def _kept(op):
    from dataclasses import replace

    return replace(op, kept=True)


def chain(words, *, gradients=((-1, 1e6),), side=BACKWARD, looped=65536.0):
    """Ops in a row, each reading the one before."""
    n = len(words)
    ops = [
        OpNode(
            f"op{i}", w, "fp32", looped, looped, 1e-4, 4 * looped, side, last=256.0, kept=i == n - 1
        )
        for i, w in enumerate(words)
    ]
    found = tuple(Gradient(f"p{k}", size, i % n) for k, (i, size) in enumerate(gradients))
    rows = [(i, i + 1, 0) for i in range(n - 1)]
    return Problem("chain", "1" * 16, tuple(ops), *edges_of(rows), found, 1e-4, wire(), DEVICE)
