"""Corrects prices of fused ops for the device at hand: `foretell bench --fused`.

A few hundred regions are made (half drawn at random, half cut from the small models), compiled and
measured here, and what the shipped prices miss by is fitted by kind of cost (→
`fused.tuning`). Errors are given before and after, the latter by fits that did not see
the reading.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from foretell.cluster.node import Device
from foretell.cluster.read import devices
from foretell.cost.fused import fused_price
from foretell.errors import InputError
from foretell_lab.bench.clock import place_for
from foretell_lab.fused import tuning
from foretell_lab.fused.columns import dtype_size
from foretell_lab.fused.data import Measured
from foretell_lab.fused.draw import drawn
from foretell_lab.fused.gather import measured_regions
from foretell_lab.fused.host import HostJob, measure_host
from foretell_lab.fused.make import cut_blocks
from foretell_lab.fused.measure import Job, measure
from foretell_lab.fused.region import Region, dumps
from foretell_lab.fused.tuning import one_core

FILE = "fused.toml"
_COUNT, _QUICK = 400, 12
_MOST = {"cuda": 2**31, "cpu": 2**27}  # bytes of one region's entering tensors
_MOST_QUICK = 2**21


def bench(output: Path, device: str, seconds: float, *, quick: bool = False) -> dict[str, Any]:
    """Measure regions here and write the corrections; errors before and after."""
    place = place_for(device)
    kind = "cuda" if place.is_cuda else "cpu"
    most = _MOST_QUICK if quick else _MOST[kind]
    chosen = regions_for(_QUICK if quick else _COUNT, most, quick)
    target = _preset() if kind == "cuda" else one_core()
    return tuned(_measured(chosen, kind, seconds), target, output / FILE)


def regions_for(count: int, most: float, quick: bool) -> list[Region]:
    """Regions whose tensors are not too large, the same ones every time."""
    chance = Random(0)
    found: list[Region] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of torch's own tracing
        blocks = iter(()) if quick else cut_blocks(chance)
        while len(found) < count:
            more = [*drawn(chance, 12), *next(blocks, [])[:12]]
            found += [r for r in more if _entering(r) <= most]
    return found[:count]


def _entering(region: Region) -> float:
    """Bytes of the tensors a region reads."""
    return sum(float(np.prod(e.shape)) * dtype_size(e.dtype) for e in region.entries)


def _measured(chosen: list[Region], kind: str, seconds: float) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        path, out = f"{folder}/regions.txt", f"{folder}/results.jsonl"
        Path(path).write_text("".join(dumps(r) + "\n" for r in chosen))
        ends = time.time() + seconds
        if kind == "cuda":
            measure(Job(path, out, kind, ends, alone=False), max(1, (os.cpu_count() or 2) - 1))
        else:
            measure_host(HostJob(path, out, ends, alone=False, rounds=1))
        if not Path(out).is_file():
            raise InputError("no region could be measured", hint="give it more `--seconds`")
        return measured_regions([(path, out)])


def tuned(found: Measured, device: Device, path: Path) -> dict[str, Any]:
    """Fit the corrections, write them, and tell what they are worth."""
    priced = fused_price(found.regions, device).seconds
    found_tuning = tuning.fitted(found.regions, found.seconds, priced, device)
    tuning.write(found_tuning, path)
    before = float(np.median(np.abs(priced / found.seconds - 1)))
    left = tuning.left_over(found.regions, found.seconds, priced, device)
    return {
        "fused": str(path),
        "fused_device": device.name,
        "fused_regions": len(found),
        "fused_error": before,
        "fused_error_tuned": float(np.median(np.abs(np.exp(-left) - 1))),
        "fused_sigma": found_tuning.sigma,
    }


def _preset() -> Device:
    """The preset of the GPU here."""
    name = torch.cuda.get_device_name().lower().replace("-", " ").split()
    known = devices()
    fitting = [d for d in known if set(d.replace("-", " ").split()) <= set(name)]
    if not fitting:
        raise InputError(
            f"no preset for `{torch.cuda.get_device_name()}`",
            hint=f"presets: {', '.join(sorted(known)[:12])} …",
        )
    return known[max(fitting, key=len)]
