"""Scaled dot-product attention by each backend, forward and backward, causal or not.

The layout is the backend: flash, efficient, cudnn or math. b sequences, h heads, s tokens, d a
head; dropout=1 drops a tenth of the scores, mask=1 adds a bias to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from foretell_lab.bench.call import Build, Call, Place, forward_or_backward
from foretell_lab.bench.case import Case, case, dims, fill

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# Batch, heads, tokens, head dim of BERT, GPT-2, ViT, DistilBERT, T5, Llama, Whisper, OPT.
_KNOWN = dims("32x12x128x64 16x12x512x64 8x12x1024x64 4x16x1024x64 64x12x197x64 32x16x197x64")
_KNOWN += dims("32x12x256x64 8x8x512x64 2x32x2048x128 1x32x4096x128 8x8x1500x64 4x32x1024x80")
_KNOWN += dims("16x6x577x64 64x3x197x64 16x8x256x32")
_WAYS = (
    ("fp32", "efficient"), ("fp32", "math"), ("bf16", "cudnn"), ("bf16", "flash"),
    ("bf16", "efficient"), ("bf16", "math"),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Every attention to measure."""
    drawn = [
        (
            max(1, round(b)),
            round(h),
            round(s / 16) * 16 if i % 3 else round(s),
            (64, 128, 32, 64, 96)[i % 5],
        )
        for i, (b, h, s) in enumerate(fill(25, (1, 64), (2, 32), (32, 4096)))
    ]
    for i, (b, h, s, d) in enumerate([*_KNOWN, *drawn]):
        if b * h * s * s * d > 2e11:
            b = max(1, int(2e11 / (h * s * s * d)))
        extra = {} if i % 3 else {"dropout": 1}
        extra |= {"mask": 1} if i % 5 == 4 else {}
        shape = {"b": b, "h": h, "s": s, "d": d, "causal": 0 if "mask" in extra else i % 2, **extra}
        yield from _each(shape, ("fp16", "cudnn") if i % 4 == 0 else None)


def _each(shape: dict[str, int], more: tuple[str, str] | None) -> Iterator[Case]:
    for dtype, backend in _WAYS + ((more,) if more else ()):
        scores = shape["b"] * shape["h"] * shape["s"] ** 2
        if (backend == "math" and scores > 5e8) or (backend == "flash" and "mask" in shape):
            continue
        for direction in ("forward", "backward"):
            yield case("attention", direction, dtype, backend, **shape)


def attention(case: Case, place: Place) -> Call:
    """Attention by one backend; heads come as linear layers leave them, tokens first."""
    b, h, s, d = (case[name] for name in "bhsd")
    q, k, v = (place.randn(b, s, h, d, dtype=case.dtype, grad=True) for _ in range(3))
    mask = place.randn(b, 1, s, s, dtype=case.dtype) if case.size("mask", 0) else None
    dropout = 0.1 if case.size("dropout", 0) else 0.0

    def function(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(BACKENDS[case.layout]):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=bool(case["causal"])
            )

    return forward_or_backward(case, function, (q, k, v))


BUILD: dict[str, Build] = {"attention": attention}
