"""Makes a file of regions for one core of a CPU: the same models and draws, smaller.

A model's batch is cut by up to 64, since a core is no GPU; regions that would still take long, by
the formula or by their matmuls, are left out. Blocks are shuffled and some regions come twice, as
in `make`.
"""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from foretell.cost.fused import fused_price
from foretell_lab.fused.capture import capture_step
from foretell_lab.fused.columns import columns
from foretell_lab.fused.cut import Net, regions
from foretell_lab.fused.draw import drawn
from foretell_lab.fused.models import HELD_OUT, MODELS
from foretell_lab.fused.models.parts import PRECISIONS
from foretell_lab.fused.region import Region, dumps
from foretell_lab.fused.tuning import one_core

Tensor = Any
_AGAIN = 0.03  # share of regions that come twice
_DRAWN = 0.15  # share drawn at random
_HELD_OUT = 2.0  # captures of a model kept out of training, against one that is not
_CUT = (1, 2, 4, 8, 16, 32, 64)  # by how much batches are cut
_FEW = 14  # regions of one capture: many shapes rather than many parts of one
_PLACES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_LONGEST = 1.2e-2  # seconds by the formula
_FLOPS = 1e9  # of matmuls: some ten milliseconds of one core


def make_host(path: Path, count: int, seed: int) -> int:
    """Write regions; how many."""
    chance = Random(seed)
    found: dict[str, Region] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of torch's own tracing
        for block in _blocks(chance):
            found |= {r.key: r for r in short(block)[:_FEW]}
            if len(found) >= count:
                break
    lines = [dumps(r) for r in found.values()]
    chance.shuffle(lines)
    lines += [line for line in lines if chance.random() < _AGAIN]
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), 6, mtime=0))
    return len(lines)


def _blocks(chance: Random) -> Iterator[list[Region]]:
    """Regions of one small model or draw after another."""
    weights = [_HELD_OUT if name in HELD_OUT else 1.0 for name in MODELS]
    while True:
        if chance.random() < _DRAWN:
            yield list(drawn(chance, _FEW, _PLACES))
            continue
        name, precision = chance.choices(list(MODELS), weights)[0], chance.choice(PRECISIONS)
        net = Net(capture_step(partial(_smaller, name, chance, precision)))
        yield list(regions(net, chance, name, 2 * _FEW))


def _smaller(name: str, chance: Random, precision: str) -> tuple[Any, tuple[Tensor, ...], Any]:
    """A model with a part of its batch."""
    model, inputs, loss = MODELS[name](chance, precision)
    batch = max(1, len(inputs[0]) // chance.choice(_CUT))
    same = all(len(x) == len(inputs[0]) for x in inputs)
    return model, tuple(_part(x, batch) for x in inputs) if same else inputs, loss


def _part(x: Tensor, batch: int) -> Tensor:
    return x.detach()[:batch].requires_grad_(x.requires_grad)


def short(block: list[Region]) -> list[Region]:
    """Those of some regions that do not take long on one core."""
    if not block:
        return []
    made = columns(block)
    flops = np.bincount(made.region, made.flops, len(made))
    seconds = fused_price(made, one_core(), learned=False).seconds
    return [r for r, ok in zip(block, (flops < _FLOPS) & (seconds < _LONGEST), strict=True) if ok]
