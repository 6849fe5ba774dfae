"""Memory that libraries take for themselves.

cuBLAS keeps a workspace for each thread that uses it; a step has two, its own and the one autograd
runs on. Workspaces of convolutions depend on the algorithm cuDNN picks and are not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretell.graph import BufferKind
from foretell.graph.columns import NONE
from foretell.pytorch.capture.choices import CPU
from foretell.pytorch.capture.ledger import Stay
from foretell.pytorch.capture.record import Row

# PyTorch documentation, CUDA semantics, cuBLAS workspaces: 32 MiB on Hopper and later, else 8.125.
_LARGE, _SMALL = 32 * 2**20, 8519680
_THREADS = 2
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def workspace(rows: Sequence[Row], arch: str) -> list[Stay]:
    """What cuBLAS holds where a step has matmuls."""
    if arch == CPU or not any(row.op in _PRODUCTS for row in rows):
        return []
    size = _LARGE if arch in ("hopper", "blackwell") else _SMALL
    return [Stay(float(size), NONE, BufferKind.WORKSPACE, "cuBLAS") for _ in range(_THREADS)]
