"""LSTM and GRU layers as one fused call, forward and backward: s steps, b sequences, n wide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from foretell_lab.bench.call import DTYPES, Build, Call, Place, forward_or_backward
from foretell_lab.bench.case import Case, case, dims, fill, one_of

# Steps, batch, width, layers of language and speech models (AWD-LSTM, DeepSpeech 2, GNMT).
_KNOWN = dims("35x20x650x2 35x20x1500x2 70x80x1152x1 200x32x800x1 50x64x1024x1")
_KINDS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}


def cases() -> Iterator[Case]:
    """Every recurrent layer to measure."""
    drawn = [
        (round(s), round(b), round(n / 8) * 8, one_of((1, 1, 2), i))
        for i, (s, b, n) in enumerate(fill(9, (8, 256), (4, 256), (64, 1536)))
    ]
    for i, (s, b, n, layers) in enumerate([*_KNOWN, *drawn]):
        for dtype in ("fp32", "tf32", "bf16") + (("fp16",) if i % 3 == 0 else ()):
            for direction in ("forward", "backward"):
                yield case(
                    tuple(_KINDS)[i % 2], direction, dtype, "-", s=s, b=b, n=n, layers=layers
                )


def recurrent(asked: Case, place: Place) -> Call:
    """A recurrent layer over a whole sequence."""
    made = _KINDS[asked.op](asked["n"], asked["n"], asked["layers"])
    layer = made.to(device=place.device, dtype=DTYPES[asked.dtype])
    x = place.randn(asked["s"], asked["b"], asked["n"], dtype=asked.dtype, grad=True)
    weights = tuple(layer.parameters())

    def function(x: Any, *_: Any) -> Any:
        return layer(x)[0]

    return forward_or_backward(asked, function, (x, *weights))


BUILD: dict[str, Build] = dict.fromkeys(_KINDS, recurrent)
