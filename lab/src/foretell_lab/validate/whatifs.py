"""What-ifs from one trace, compared with the same change made and timed.

`h200/` has, for each model, a trace of the plain step (and of one under autocast) and the
un-profiled times of many variants. A row's truth is an interval (two ways of timing it); an error
counts from the nearer end. A variant is called by one of the names below, or by its what-ifs as the
command line takes them; `on` names the cluster file beside `h200/` where there is one. Beside it
stands what fixed ratios give on the rows with half precision: kernels of matmuls three times, all
others twice as fast (Daydream, section 5), the host as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from foretell.baseline import Baseline, interval, shares, unprofiled
from foretell.cluster import load
from foretell.trace import read
from foretell.whatif import Setting, applied, parse
from foretell.whatif.registry import WHATIFS, together
from foretell_lab.validate import half
from foretell_lab.validate.variants import variants

# What each measured variant is called here.
SPECS = {
    "tf32": ("tf32",),
    "amp_bf16": ("amp:dtype=bf16",),
    "amp_fp16": ("amp:dtype=fp16",),
    "opt_foreach": ("foreach-optimizer",),
    "opt_fused": ("fused-optimizer",),
    "batch_x2": ("batch:times=2",),
    "batch_half": ("batch:times=0.5",),
    "checkpoint": ("checkpoint",),
    "cudagraph": ("cuda-graph",),
    "nhwc": ("channels-last",),
    "compile": ("compile",),
    "amp_bf16+fused": ("amp:dtype=bf16", "fused-optimizer"),
    "amp_bf16+cudagraph": ("amp:dtype=bf16", "cuda-graph"),
    "amp_bf16+nhwc": ("amp:dtype=bf16", "channels-last"),
    "amp_bf16+compile": ("amp:dtype=bf16", "compile"),
}


# From a trace under autocast: what is changed further.
UNDER_AUTOCAST = {
    "amp_bf16+fused": ("fused-optimizer",),
    "amp_bf16+cudagraph": ("cuda-graph",),
    "amp_bf16+nhwc": ("channels-last",),
    "amp_bf16+compile": ("compile",),
}
FIXED = (
    "scale:select=kind=kernel+op=*mm/*convolution*+phase!=update,times=0.333333",
    "scale:select=kind=kernel+op!=*mm/*convolution*+phase!=update,times=0.5",
)
CHANGED = 0.03  # a variant this much faster or slower has a sign
FAR = 0.1
HOLDERS = ("host", "device")


@dataclass(frozen=True)
class Row:
    """One variant of one model: what was measured and what was predicted."""

    model: str
    start: str  # the variant whose trace was read
    variant: str
    before: float
    low: float
    high: float
    predicted: float
    least: float  # of the interval predicted
    most: float
    fixed: float | None = None  # what fixed ratios give
    holder: str = ""  # who holds the changed step up: host, device or network

    @property
    def error(self) -> float:
        """Relative error, from the nearer end of what was measured."""
        return self._off(self.predicted)

    @property
    def fixed_error(self) -> float | None:
        return None if self.fixed is None else self._off(self.fixed)

    @property
    def is_covered(self) -> bool:
        """Whether the interval predicted meets what was measured."""
        return self.least <= self.high and self.low <= self.most

    @property
    def has_sign(self) -> bool | None:
        """Whether faster was called faster; None where little changed."""
        real = (self.low + self.high) / 2
        if abs(real / self.before - 1) <= CHANGED:
            return None
        return (self.predicted < self.before) == (real < self.before)

    def _off(self, seconds: float) -> float:
        return seconds / min(max(seconds, self.low), self.high) - 1


def report(truth: Path) -> dict[str, Any]:
    """Every row that can be predicted, as values and as text; the others are counted."""
    known = variants(truth)
    found = list(rows_of(truth / "h200"))
    named = {v for rows in known.values() for v in rows if v != "base"}
    missing = sorted(v for v in named if not specs_of(v))
    left = f"not predicted: {', '.join(missing) or 'nothing'}"
    text = "\n".join([*_lines(found), left, *half.lines(list(half.halves(truth)))])
    rows = [asdict(r) | {"error": r.error, "covered": r.is_covered} for r in found]
    return {"rows": rows, "missing": missing, "text": text}


def specs_of(variant: str) -> tuple[str, ...]:
    """The what-ifs of a measured variant; none where it is called otherwise."""
    words = variant.split()
    is_known = all(word.partition(":")[0] in WHATIFS for word in words)
    return SPECS.get(variant) or (tuple(words) if is_known else ())


def rows_of(folder: Path, pattern: str = "*", most: int = 0) -> Iterator[Row]:
    """Rows of a folder of traces whose variants are called so; `most` of a model, evenly."""
    known = variants(folder.parent, folder.name)
    for model in sorted(known):
        names = [v for v in sorted(known[model]) if fnmatch(v, pattern)]
        some = set(names[:: max(len(names) // most, 1)] if most else names)
        kept = {"base", "amp_bf16"} | some
        rows = {v: row for v, row in known[model].items() if v in kept}
        yield from (r for r in _rows(folder, rows) if r.variant in some)


@lru_cache(64)
def _step(path: Path, seconds: float) -> Baseline:
    return unprofiled(read(path), seconds)


def _rows(folder: Path, rows: dict[str, Any]) -> Iterator[Row]:
    plain = {v: found for v in rows if (found := specs_of(v))}
    for start, specs in (("base", plain), ("amp_bf16", UNDER_AUTOCAST)):
        path = folder / f"{rows['base']['model']}.{start}.json.gz"
        if start in rows and path.exists():
            step = _step(path, rows[start]["median_ms"] / 1e3)
            for variant in sorted(set(specs) & set(rows)):
                on = rows[variant].get("on")
                setting = Setting(load(str(folder.parent / f"{on}.toml")) if on else None)
                yield _row(step, rows, start, variant, specs[variant], setting)


def _row(
    step: Baseline, rows: dict[str, Any], start: str, variant: str, specs: tuple[str, ...],
    setting: Setting,
) -> Row:  # fmt: skip
    changes = [parse(spec) for spec in specs]
    after = applied(changes, step.graph, setting)
    spread = together(changes)
    least, most = interval(after, step.predicted, host=step.sigma, spread=spread)
    truth = rows[variant]
    return Row(
        truth["model"], start, variant, step.seconds, truth["low_ms"] / 1e3,
        truth["high_ms"] / 1e3, step.predicted(after), least, most,
        _fixed(step, specs) if start == "base" else None, shares(after).bottleneck,
    )  # fmt: skip


def _fixed(step: Baseline, specs: tuple[str, ...]) -> float | None:
    """The same with fixed ratios in place of the format's what-if; None for other rows."""
    if not specs[0].startswith("amp"):
        return None
    changes = [parse(spec) for spec in (*FIXED, *specs[1:])]
    return step.predicted(applied(changes, step.graph, Setting()))


def _lines(rows: list[Row]) -> Iterator[str]:
    for r in rows:
        yield (
            f"{r.model:18} {r.start[:4]:4} {r.variant:18} {1e3 * r.low:6.1f}–{1e3 * r.high:5.1f} ms"
            f" told {1e3 * r.predicted:6.1f} {r.error:+6.1%}{'' if r.is_covered else ' *'}"
        )
    yield "* outside the interval that should hold in 80 % of cases"
    yield ""
    for start in ("base", "amp_bf16"):
        mine = [r for r in rows if r.start == start]
        for variant in sorted({r.variant for r in mine}):
            yield _summary(f"{start[:4]} {variant}", [r for r in mine if r.variant == variant])
        if mine:
            yield _summary(f"all from {start}", mine)
            yield _shares(mine)
            yield _causes(mine)
    yield from _beside_fixed(rows)


def _summary(name: str, rows: list[Row]) -> str:
    errors = np.abs([r.error for r in rows])
    worst = rows[int(errors.argmax())]
    return (
        f"{name:24} {len(rows):3} rows  median {np.median(errors):5.1%}  "
        f"p90 {np.quantile(errors, 0.9):5.1%}  worst {errors.max():5.1%} "
        f"({worst.model} {worst.variant})"
    )


def _shares(rows: list[Row]) -> str:
    signs = [r.has_sign for r in rows if r.has_sign is not None]
    near = np.mean([abs(r.error) <= 0.15 for r in rows])
    return (
        f"{'':24} within 15 %: {near:.0%}; sign right: {np.mean(signs) if signs else 1:.0%} of "
        f"{len(signs)}; in the interval: {np.mean([r.is_covered for r in rows]):.0%}"
    )


def _causes(rows: list[Row]) -> str:
    """The bottleneck of rows with large errors."""
    far = [r for r in rows if abs(r.error) > FAR]
    lines = [f"{sum(r.holder == who for r in far)} by the {who}" for who in HOLDERS]
    worst = max(rows, key=lambda r: abs(r.error))
    return (
        f"{'':24} the worst is a {worst.holder}-bound step; of {len(far)} rows off by "
        f"more than {FAR:.0%} are bound {', '.join(lines)}"
    )


def _beside_fixed(rows: list[Row]) -> Iterator[str]:
    both = [(abs(r.error), abs(r.fixed_error)) for r in rows if r.fixed_error is not None]
    if both:
        ours, fixed = np.median(both, axis=0)
        yield f"half precision from base: median {ours:.1%}; fixed ratios (÷3, ÷2) {fixed:.1%}"
