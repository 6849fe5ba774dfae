"""Fit the constants of the kernel formulas to measured kernels; write them; print the errors.

    python benchmarks/fit_kernels.py [../shared/truth] [--quick]

writes `cost/tables/kernel.toml` (constants), `validate/tables/kernel_clocks.toml` (what each
source's way of timing adds) and `cost/tables/kernel_accuracy.json`: errors on whole chips and whole
ranges of size that were left out of a fit made for that purpose. The stated spread of a class of op
is that of those errors: of left-out ranges for architectures that were measured, of left-out chips
for others. Then it trains the correction that stands before the formula, and writes
`cost/tables/kernel_learned.npz`. `--quick` makes the full fit alone, `--learn` the correction
alone, with the constants that are there. Run again on the same files it writes the same files.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from kernel_fit import fit, sample, take, turn_roofline
from kernel_knobs import CONV_OPS, State
from kernel_trees import trained
from numpy.typing import NDArray

from foretell.cost.kernel import pipe_of, shipped
from foretell.cost.kernel import write_constants as write
from foretell_lab.validate import kernel_clocks
from foretell_lab.validate.kernel_devices import chip, device_named
from foretell_lab.validate.kernel_truth import Measured
from foretell_lab.validate.kernels import EIGHTY, family, held_out, measured, priced

Floats = NDArray[np.float64]
SOURCE = Path(__file__).resolve().parent.parent / "src" / "foretell"
LAB = SOURCE.parents[1] / "lab" / "src" / "foretell_lab" / "validate" / "tables"
FULL = {"cap": 800, "steps": 30}
FOLD = {"cap": 200, "steps": 12}
EACH = 500  # readings of a source, device and op that count in a pooled figure
LEAST = 0.05  # no kernel model is surer than 5 %
FEW = 40  # left-out readings below which a spread is not told from them
ALONE = 0.2  # spread that another chip adds to a class measured on one
BETTER = 0.9  # a correction stays where it takes a tenth off the formula's median error
UNTOLD = 0.35  # spread of a class that no left-out reading tells


@dataclass(frozen=True)
class Residual:
    """Errors on the left-out readings of one source, device and op."""

    out: str  # what was left out
    op: str
    kind: str  # class of op and pipe whose spread they tell
    log: Floats  # ln(priced/measured)


def main(arguments: list[str]) -> None:
    truth = Path(next((a for a in arguments if not a.startswith("-")), "../shared/truth"))
    found = measured(truth)
    if "--learn" in arguments:
        _again(found)
        return
    say(f"{sum(map(len, found))} readings in {len(found)} groups")
    state = fit(found, **FULL)
    bare = turn_roofline(state, [sample(m, FULL["cap"]) for m in found], FULL["steps"])
    state[0].sigma["bare"].update(seen=bare, unseen=bare)
    _write_constants(state)
    say("full fit written")
    if "--quick" in arguments:
        return
    chips = list(_leave_out_chips(found))
    sizes = list(_leave_out_sizes(found))
    sigma = {**state[0].sigma, **spreads(chips, sizes)}
    state = replace(state[0], sigma=sigma), state[1]
    _write_constants(state)
    learned = list(_learn(state, found))
    record = {
        "learned": learned,
        "chips": list(_figures(chips, by="out")),
        "sizes": list(_figures(sizes, by="out")),
        "summary": [*_figures(chips, by="", out="a chip"), *_figures(sizes, by="", out="a range")],
    }
    _write("cost/tables/kernel_accuracy.json", json.dumps(record, indent=1) + "\n")
    for row in (*record["chips"], *record["sizes"], *record["summary"], *learned):
        say(
            " ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        )


def _again(found: Sequence[Measured]) -> None:
    """Train the correction to the constants as they are, and put its figures with the others."""
    record = held_out()
    record["learned"] = list(_learn((shipped(), dict(kernel_clocks.shipped())), found))
    _write("cost/tables/kernel_accuracy.json", json.dumps(record, indent=1) + "\n")
    for row in record["learned"]:
        say(" ".join(f"{k}={v}" for k, v in row.items()))


def _learn(state: State, found: Sequence[Measured]) -> Iterator[dict[str, Any]]:
    """Train the correction; keep it where it beats the formula on ranges left out of training."""
    arrays: dict[str, Any] = {}
    for name, trees, figures in trained(state, found):
        figures["kept"] = figures["learned"] < BETTER * figures["formula"]
        if figures["kept"]:
            arrays[f"{name}/feature"] = trees.feature.astype(np.uint8)
            arrays[f"{name}/above"], arrays[f"{name}/leaf"] = trees.above, trees.leaf
            arrays[f"{name}/box"] = np.stack([trees.low, trees.high]).astype(np.float32)
            arrays[f"{name}/sigma"] = np.float32(trees.sigma)
        yield figures
    np.savez_compressed(SOURCE / "cost/tables/kernel_learned.npz", **arrays)


def _write_constants(state: State) -> None:
    _write("cost/tables/kernel.toml", write(state[0]))
    clocks = "\n".join(f"{k} = {v:.4g}" for k, v in state[1].items())
    title = "# Written by benchmarks/fit_kernels.py from measured kernels: do not edit.\n"
    LAB.joinpath("kernel_clocks.toml").write_text(f"{title}\n[clocks]\n{clocks}\n")


def _leave_out_chips(found: Sequence[Measured]) -> Iterator[Residual]:
    """Each chip in all its packages and sources, left out in turn."""
    chips = sorted({_chip(m) for m in found})
    for name in chips:
        state = fit([m for m in found if _chip(m) != name], **FOLD)
        left = list(_residuals(state, name, (m for m in found if _chip(m) == name)))
        say(f"without {name}: {_brief(left)}")
        yield from left


def _leave_out_sizes(found: Sequence[Measured]) -> Iterator[Residual]:
    """Each third of the range of sizes, left out in turn, and products with a short side."""
    for name in ("small", "middle", "large", "skinny"):
        inside = [_inside(m, name) for m in found]
        kept = [take(m, np.flatnonzero(~i)) for m, i in zip(found, inside, strict=True)]
        left = [take(m, np.flatnonzero(i)) for m, i in zip(found, inside, strict=True) if i.any()]
        state = fit([m for m in kept if len(m)], **FOLD)
        missed = list(_residuals(state, name, left))
        say(f"without {name}: {_brief(missed)}")
        yield from missed


def _brief(left: Sequence[Residual]) -> str:
    kinds = sorted({r.kind for r in left})
    errors = {k: np.abs(np.expm1(pooled([r for r in left if r.kind == k]))) for k in kinds}
    return ", ".join(f"{k} {np.median(e):.1%}" for k, e in errors.items())


def _inside(m: Measured, name: str) -> NDArray[np.bool_]:
    if name == "skinny":
        if m.op != "gemm":
            return np.zeros(len(m), bool)
        short = np.minimum(m.shape["m"], m.shape["n"]) <= 64
        return np.bincount(m.reading, short, len(m)) > 0
    low, high = THIRDS[family(m.op)]
    amount = size(m)
    ends = {"small": (0.0, low), "middle": (low, high), "large": (high, np.inf)}[name]
    return (amount >= ends[0]) & (amount < ends[1])


# flop (bytes for memory-bound ops) between the thirds of the logarithm of what models ask for
THIRDS = {"gemm": (1e9, 3e10), "conv": (3e9, 3e10), "memory": (3e6, 6e7), "attention": (1e9, 1e10)}


def size(m: Measured) -> Floats:
    """Flop of each reading, or bytes where the op is bound by memory."""
    s = m.shape
    if m.op == "gemm":
        each = 2 * s.get("b", np.ones(len(s["m"]))) * s["m"] * s["n"] * s["k"]
    elif m.op in CONV_OPS:
        out = np.floor((s["h"] + 2 * s["pad"] - s["r"]) / s["stride"]) + 1
        each = 2 * s["n"] * s["k"] * out**2 * s["c"] * s["r"] * s["s"] / s.get("groups", 1.0)
    elif m.op == "attention":
        each = 4 * s["b"] * s["heads"] * s["sq"] * s["sk"] * s["d"]
    else:
        each = m.bytes if m.bytes is not None else s["n"]
    return np.bincount(m.reading, np.nan_to_num(each), len(m))


def _residuals(state: State, out: str, left: Iterable[Measured]) -> Iterator[Residual]:
    for m in left:
        seen = kernel_clocks.sees(state[1], m)
        if seen.any():
            log = np.log(priced(m, *state)[0] / m.seconds)[seen]
            yield Residual(out, m.op, _kind(m), log)


def _chip(m: Measured) -> str:
    device = device_named(m.device)
    assert device is not None
    return chip(device)


def _kind(m: Measured) -> str:
    device = device_named(m.device)
    assert device is not None
    products = ("gemm", "attention", *CONV_OPS)
    return f"{m.op}_{pipe_of(device, m.dtype)}" if m.op in products else m.op


def spreads(chips: Sequence[Residual], sizes: Sequence[Residual]) -> dict[str, dict[str, float]]:
    """Stated spread by class of op, seen and unseen architectures apart."""
    kinds = sorted({r.kind for r in (*chips, *sizes)})
    found = {}
    for kind in kinds:
        outs = {r.out for r in chips if r.kind == kind}
        seen = spread([r for r in sizes if r.kind == kind])
        unseen = spread([r for r in chips if r.kind == kind])
        if len(outs) < 2:  # the class was never fitted without it: only its own chip tells
            unseen = float(np.hypot(seen, ALONE))
        found[kind] = {"seen": round(seen, 3), "unseen": round(max(unseen, seen), 3)}
    return found


def spread(residuals: Sequence[Residual]) -> float:
    """The sigma of which ±1.28 holds 80 % of the errors."""
    log = pooled(residuals)
    if len(log) < FEW:
        return UNTOLD
    return max(LEAST, float(np.quantile(np.abs(log), 0.8)) / EIGHTY)


def pooled(residuals: Sequence[Residual]) -> Floats:
    """Errors of all groups, none counting for more than `EACH` readings."""
    parts = []
    for r in residuals:
        step = max(1, len(r.log) // EACH)
        parts.append(np.sort(r.log)[step // 2 :: step])
    return np.concatenate(parts) if parts else np.empty(0)


def _figures(residuals: Sequence[Residual], by: str, out: str = "") -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Residual]] = defaultdict(list)
    for r in residuals:
        groups[family(r.op), r.out if by else out].append(r)
    for (kind, name), mine in sorted(groups.items()):
        errors = np.abs(np.expm1(pooled(mine)))
        yield {
            "op": kind,
            "out": name,
            "readings": sum(len(r.log) for r in mine),
            "median": round(float(np.median(errors)), 4),
            "p90": round(float(np.quantile(errors, 0.9)), 4),
            "covered": round(_covered(mine, residuals), 4),
        }


def _covered(mine: Sequence[Residual], everything: Sequence[Residual]) -> float:
    """Share of errors inside the interval that the other folds would have stated."""
    inside = []
    for r in mine:
        others = [o for o in everything if o.kind == r.kind and o.out != r.out]
        sigma = spread(others) if others else float(np.hypot(UNTOLD, ALONE))
        inside.append(np.abs(pooled([r])) <= EIGHTY * sigma)
    return float(np.concatenate(inside).mean())


def _write(name: str, text: str) -> None:
    path = SOURCE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


_BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - _BEGAN:6.0f} s  {text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
