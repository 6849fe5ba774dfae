"""Peak memory of what-ifs from one trace, compared with the change made and measured.

Each row of `h200/truth.json` has the most that PyTorch's allocator had given out. It is predicted
twice: from the trace alone, and with the measured peak of the plain step given, for what a process
holds besides the step is in the measurement but in no trace. CUDA-graph rows are left out: their
tensors are in a pool that this peak does not count.

What a process holds besides is mostly what earlier runs in it left: a CUDA graph's stream keeps a
cuBLAS workspace of 65 MiB for good, and the truth's variants ran one after the other in a process.
`host_steps_h200.json` has eleven of those models again with the workspaces given back before each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretell.memory.tape import FACT, decode, occupancy
from foretell.trace import read
from foretell.whatif import WHATIFS, parse
from foretell.whatif.registry import peak_between
from foretell_lab.validate.variants import variants
from foretell_lab.validate.whatifs import SPECS

_POOLED = "cudagraph"
CLEAN = Path("benchmarks/measured/host_steps_h200.json")  # from the project's root


@dataclass(frozen=True)
class Row:
    """One variant of one model: bytes measured, and bytes predicted in two ways."""

    model: str
    variant: str
    measured: float
    alone: float
    given: float  # with the measured peak of the plain step
    interval: tuple[float, float] = (0.0, 0.0)  # from the trace alone

    @property
    def error(self) -> float:
        """Relative error from the trace alone."""
        return self.alone / self.measured - 1

    @property
    def is_covered(self) -> bool:
        """Whether the interval from the trace alone holds what was measured."""
        return self.interval[0] <= self.measured <= self.interval[1]

    @property
    def error_given(self) -> float:
        """Relative error with the plain step's peak given."""
        return self.given / self.measured - 1


def report(truth: Path) -> dict[str, Any]:
    """Every row, as values and as text."""
    models = variants(truth)
    traced = [model for model in sorted(models) if _trace(truth, model).exists()]
    rows = [row for model in traced for row in _rows(truth, models[model])]
    values = [vars(r) | {"error": r.error, "error_given": r.error_given} for r in rows]
    values = [v | {"covered": r.is_covered} for v, r in zip(values, rows, strict=True)]
    clean = list(_clean(truth))
    text = "\n".join([*_lines(rows), *_clean_lines(clean)])
    return {"rows": values, "clean": [vars(r) | {"error": r.error} for r in clean], "text": text}


def _trace(truth: Path, model: str) -> Path:
    return truth / "h200" / f"{model}.base.json.gz"


def _rows(truth: Path, measured: dict[str, Any]) -> Iterator[Row]:
    model = measured["base"]["model"]
    facts = read(_trace(truth, model)).graph.facts
    plain, ran_before = decode(facts[FACT]), bool(facts.get("profiled_before"))
    base = occupancy(plain).peak
    besides = measured["base"]["peak_mib"] * 2**20 - base
    for variant, row in measured.items():
        specs = () if variant == "base" else SPECS.get(variant)
        if specs is None or _POOLED in variant:
            continue
        if not all(s.partition(":")[0] in WHATIFS for s in specs):
            continue
        tape, changes = plain, [parse(spec) for spec in specs]
        for change in changes:
            tape = change.hold(tape)
        peak = occupancy(tape).peak
        between = peak_between(peak, changes, is_given=False, ran_before=ran_before)
        yield Row(model, variant, row["peak_mib"] * 2**20, peak, peak + besides, between)


def _clean(truth: Path) -> Iterator[Row]:
    """Steps of a process that holds nothing else, against the trace alone."""
    known = json.loads(CLEAN.read_text())["rows"] if CLEAN.exists() else []
    for row in known:
        traces = [truth / name / f"{row.get('model')}.base.json.gz" for name in ("h200", "h200_2")]
        trace = next((path for path in traces if path.exists()), None)
        if row["part"] != "memory" or row["variant"] not in ("base", "amp_bf16") or not trace:
            continue
        tape = decode(read(trace).graph.facts[FACT])
        for spec in () if row["variant"] == "base" else SPECS[row["variant"]]:
            tape = parse(spec).hold(tape)
        peak = occupancy(tape).peak
        yield Row(row["model"], row["variant"], row["peak_mib"] * 2**20, peak, peak)


def _clean_lines(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield "in a process that holds nothing else"
    for r in rows:
        line = f"{r.measured / 2**20:8.0f} {r.alone / 2**20:5.0f} {r.error:+7.1%}"
        yield f"{r.model:20} {r.variant:17} {line}"
    size = np.abs([r.error for r in rows])
    yield f"{len(rows)} rows: median {np.median(size):.1%} worst {size.max():.1%}"


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    yield f"{'MiB':38} measured  told          with the plain peak"
    for r in rows:
        yield (
            f"{r.model:20} {r.variant:17} {r.measured / 2**20:8.0f} {r.alone / 2**20:5.0f} "
            f"{r.error:+7.1%} {r.error_given:+14.1%}"
        )
    yield ""
    for variant in sorted({r.variant for r in rows}):
        yield _summary(variant, [r for r in rows if r.variant == variant])
    yield _summary("all", rows)


def _summary(name: str, rows: Sequence[Row]) -> str:
    parts = [f"{name:17} {len(rows):3} rows"]
    for word, errors in (
        ("alone", [r.error for r in rows]),
        ("given", [r.error_given for r in rows if r.variant != "base"]),
    ):
        if errors:
            size = np.abs(errors)
            parts.append(f"{word}: median {np.median(size):5.1%} worst {size.max():5.1%}")
    parts.append(f"in the interval {np.mean([r.is_covered for r in rows]):.0%}")
    return "  ".join(parts)
