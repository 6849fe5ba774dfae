"""LSTM and GRU layers as one fused call, forward and backward: s steps, b sequences, n wide.

`both` layers of two directions each; `c` numbers in, as many as a layer makes where it is not said.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from foretell_lab.bench.call import DTYPES, Build, Call, Place, forward_or_backward
from foretell_lab.bench.case import Case, case, dims, fill, one_of

# Steps, batch, width, layers of language and speech models (AWD-LSTM, DeepSpeech 2, GNMT).
_KNOWN = dims("35x20x650x2 35x20x1500x2 70x80x1152x1 200x32x800x1 50x64x1024x1")
# Steps, batch, width, layers, directions, inputs: speech nets, agents, taggers, translation.
_MORE = dims("400x32x800x5x2x1312 200x16x512x4x2x1024 200x32x256x3x2x640 100x64x512x2x1x512")
_MORE += dims("20x32x256x1x1x256 80x128x256x1x1x256 64x16x1024x4x1x1024 512x8x320x3x2x320")
_MORE += dims("150x64x1024x6x2x672 30x256x128x2x1x64 50x20x200x2x1x200 300x4x768x1x2x768")
_MORE += dims("100x32x384x1x1x384 25x512x512x1x1x512 128x32x128x1x2x128 250x24x640x2x2x640")
_FORMATS = ("fp32", "tf32", "bf16")
_KINDS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}


def cases() -> Iterator[Case]:
    """Every recurrent layer to measure."""
    drawn = [
        (round(s), round(b), round(n / 8) * 8, one_of((1, 1, 2), i))
        for i, (s, b, n) in enumerate(fill(9, (8, 256), (4, 256), (64, 1536)))
    ]
    for i, (s, b, n, layers) in enumerate([*_KNOWN, *drawn]):
        for dtype in _FORMATS + (("fp16",) if i % 3 == 0 else ()):
            for direction in ("forward", "backward"):
                yield case(
                    tuple(_KINDS)[i % 2], direction, dtype, "-", s=s, b=b, n=n, layers=layers
                )
    for s, b, n, layers, both, inside in _MORE:
        for kind, dtype, direction in product(_KINDS, _FORMATS, ("forward", "backward")):
            more = {"both": 1, "c": inside} if both == 2 else {"c": inside}
            yield case(kind, direction, dtype, "-", s=s, b=b, n=n, layers=layers, **more)


def recurrent(case: Case, place: Place) -> Call:
    """A recurrent layer over a whole sequence."""
    inside, both = case.size("c", case["n"]), bool(case.size("both", 0))
    made = _KINDS[case.op](inside, case["n"], case["layers"], bidirectional=both)
    layer = made.to(device=place.device, dtype=DTYPES[case.dtype])
    x = place.randn(case["s"], case["b"], inside, dtype=case.dtype, grad=True)
    weights = tuple(layer.parameters())

    def function(x: Any, *_: Any) -> Any:
        return layer(x)[0]

    return forward_or_backward(case, function, (x, *weights))


BUILD: dict[str, Build] = dict.fromkeys(_KINDS, recurrent)
