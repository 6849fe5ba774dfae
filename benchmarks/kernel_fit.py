"""Fitting the constants of the kernel formulas: turning knobs until prices meet readings.

The loss forgives outliers; a weak pull towards the start keeps what the data cannot tell where
physics put it (→ `turn`). `fit` goes through all stages on a sample of the readings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from kernel_knobs import Knob, State, arch_of, lend, stages, start
from numpy.typing import NDArray
from scipy.optimize import least_squares

from foretell.cost.kernel import Group, roofline
from foretell.cost.kernel import limits_of as limits
from foretell_lab.validate import kernel_clocks
from foretell_lab.validate.kernel_devices import device_named
from foretell_lab.validate.kernel_truth import Measured
from foretell_lab.validate.kernels import EIGHTY, priced

Floats = NDArray[np.float64]

PULL = 0.3  # weight of one unit of ln(constant/start), against the residual of one reading
SCALE = 0.1  # ln error beyond which a reading counts as an outlier


def fit(measured: Sequence[Measured], *, cap: int, steps: int) -> State:
    """All stages on a sample of the readings, from the start."""
    state = start()
    found = [sample(m, cap) for m in measured]
    arches = {arch_of(m) for m in found}
    for arch, numbers in state[0].arch.items():
        numbers["measured"] = float(arch in arches)
    for knobs, chosen in stages(found):
        turn(state, knobs, chosen, steps)
    lend(state[0], found)
    return state


def sample(m: Measured, cap: int) -> Measured:
    """At most `cap` readings, the same ones every time."""
    if len(m) <= cap:
        return m
    kept = np.sort(np.random.default_rng(len(m)).permutation(len(m))[:cap])
    return take(m, kept)


def take(m: Measured, kept: NDArray[np.int64]) -> Measured:
    """Some of the readings with the kernels that belong to them."""
    number = np.full(len(m), -1)
    number[kept] = np.arange(len(kept))
    mine = number[m.reading] >= 0
    return replace(
        m,
        shape={k: v[mine] for k, v in m.shape.items()},
        bytes=None if m.bytes is None else m.bytes[mine],
        ops=None if m.ops is None else m.ops[mine],
        reading=number[m.reading][mine],
        seconds=m.seconds[kept],
    )


def turn(state: State, knobs: Sequence[Knob], chosen: Sequence[Measured], steps: int) -> None:
    """Turn knobs so that prices come closest to readings."""
    if not chosen or not knobs:
        return
    first = np.log([k.get(state) for k in knobs])
    low, high = (np.log([getattr(k, end) for k in knobs]) for end in ("low", "high"))
    first = np.clip(first, low + 1e-6, high - 1e-6)
    weights = [_weight(state, m) for m in chosen]

    def residuals(x: Floats) -> Floats:
        for knob, value in zip(knobs, np.exp(x), strict=True):
            knob.put(state, float(value))
        errors = [
            w * np.log(priced(m, *state)[0] / m.seconds)
            for w, m in zip(weights, chosen, strict=True)
        ]
        return np.concatenate([*errors, PULL * (x - first)])

    best = least_squares(
        residuals,
        first,
        loss="soft_l1",
        f_scale=SCALE,
        diff_step=0.02,
        max_nfev=steps,
        bounds=(low, high),
    )
    for knob, value in zip(knobs, np.exp(best.x), strict=True):
        knob.put(state, float(f"{value:.4g}"))


def _weight(state: State, m: Measured) -> Floats:
    """Readings of the host count little; a small group of readings counts more each."""
    seen = kernel_clocks.sees(state[1], m)
    return np.where(seen, 1.0, 0.1) * (400 / max(len(m), 40)) ** 0.25


def turn_roofline(state: State, measured: Sequence[Measured], steps: int) -> float:
    """Fit the roofline to products of which only flop and bytes are told; return its spread."""
    found = [g for m in measured if (g := _bare(state, m)) is not None]
    left = []
    for pipe, numbers in state[0].roofline.items():
        left.append(_turn_bare(numbers, [g for g in found if g[0].limits.pipe == pipe], steps))
    return round(float(np.quantile(np.abs(np.concatenate(left)), 0.8)) / EIGHTY, 3)


_BARE = {"peak": (0.2, 1.0), "half_flops": (1e5, 1e10), "bandwidth": (0.3, 1.0)}


def _turn_bare(
    numbers: dict[str, float], options: list[tuple[Group, Floats]], steps: int
) -> Floats:
    """Turn the roofline of one pipe; return what is left of ln(priced/measured)."""
    first = np.log([numbers[k] for k in _BARE])

    def residuals(x: Floats) -> Floats:
        numbers.update(zip(_BARE, (float(f"{v:.4g}") for v in np.exp(x)), strict=True))
        return np.concatenate([np.log(roofline(group) / seconds) for group, seconds in options])

    bounds = np.log(list(_BARE.values())).T
    best = least_squares(
        residuals, first, loss="soft_l1", f_scale=0.2, diff_step=0.02, max_nfev=steps, bounds=bounds
    )
    return residuals(best.x)


def _bare(state: State, m: Measured) -> tuple[Group, Floats] | None:
    if m.op != "gemm" or m.call == "backward":
        return None
    device = device_named(m.device)
    assert device is not None
    given = limits(device, m.dtype, state[0].arch)
    seen = kernel_clocks.sees(state[1], m)
    b, one = m.shape.get("b"), np.ones(len(m))
    b = one if b is None else b
    rows, cols, deep = (m.shape[k] for k in ("m", "n", "k"))
    work = 2 * b * rows * cols * deep
    moved = given.size * b * (rows * deep + cols * deep + rows * cols)
    group = Group(given, state[0], "gemm", {}, work[seen], moved[seen])
    least = kernel_clocks.floor(state[1], m) * state[1].get(f"share_{m.call}", 0.0)
    return group, np.maximum(m.seconds[seen] - least, 1e-6)
