"""Lets Inductor write matmuls and convolutions itself, so that what follows joins them.

Inductor would try dozens of tile shapes for each matmul and compile every one. Here each product
gets one: the largest tile of Inductor's own list up to 128 × 128, which it scales down to small
matmuls by itself. No library is asked, so a matmul is always one of the compiler's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_MOST = 128  # rows and columns of a tile
_DEEP = 64


def own_products() -> None:
    """From now on matmuls of this process are written by the compiler, one tile shape each."""
    import torch._inductor.config as inductor
    from torch._inductor.template_heuristics import triton as heuristics

    inductor.max_autotune_gemm = True
    inductor.max_autotune_gemm_backends = "TRITON"
    inductor.max_autotune_conv_backends = "TRITON"
    base = heuristics.BaseConfigHeuristic
    plain = base._finalize_mm_configs

    def one(self: Any, configs: Sequence[Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        given = list(configs)
        yield from plain(self, [max(given, key=_size)] if given else [], *args, **kwargs)

    base._finalize_mm_configs = one


def _size(config: Any) -> tuple[int, int, int]:
    """How large a tile is, what is beyond the most not counted."""
    m, n, k = (int(getattr(config, f"block_{name}", 1)) for name in "mnk")
    if m > _MOST or n > _MOST:
        return 0, 0, 0
    return m * n, min(k, _DEEP), int(getattr(config, "num_warps", 4)) == 8
