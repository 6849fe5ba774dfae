"""How far kernel prices are from measured kernels: by device, op and size.

    python -m foretell_lab.validate.kernels [TRUTH]

prints, for the constants that ship, one line a source, device and op: how many readings, how many
the clock could see, the median and 90th percentile of |priced/measured − 1| on those, the median of
priced/measured − 1, and the share inside the stated 80 % interval; then the same by op and size.
Those constants have seen most of these rows. What follows has not been seen: errors on whole chips
and on whole ranges of size left out of fits made for that purpose, as recorded by
`benchmarks/fit_kernels.py` in `cost/tables/kernel_accuracy.json`.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.cost import kernel
from foretell.cost.kernel import Constants
from foretell.cost.kernel import shipped as constants_shipped
from foretell.errors import InputError
from foretell_lab.validate import kernel_clocks, kernel_traces, kernel_truth, truth_folder
from foretell_lab.validate.kernel_clocks import Clocks
from foretell_lab.validate.kernel_devices import chip, device_named
from foretell_lab.validate.kernel_truth import Measured

Array = npt.NDArray[np.float64]

EIGHTY = 1.2816  # standard deviations that hold 80 % of a normal distribution
SIZES = ((0.0, 2e-5), (2e-5, 2e-4), (2e-4, 2e-3), (2e-3, 1e9))  # seconds measured
_SIZE_NAMES = ("<20 µs", "<200 µs", "<2 ms", "≥2 ms")
FAMILIES = {"gemm": "gemm", "conv": "conv", "conv_dgrad": "conv", "conv_wgrad": "conv"}


@dataclass(frozen=True)
class Accuracy:
    """Prices against readings for one source, device, op and format."""

    source: str
    device: str
    chip: str
    op: str
    dtype: str
    seconds: Array  # measured, of the readings the clock could see
    errors: Array  # priced/measured − 1 of those
    covered: float  # share of them inside the stated 80 % interval
    hidden: int  # readings of the host rather than of the kernel
    hidden_error: float  # median |priced/measured − 1| of those

    @property
    def family(self) -> str:
        """gemm, conv, attention or memory."""
        return family(self.op)

    @property
    def median(self) -> float:
        return float(np.median(np.abs(self.errors))) if len(self.errors) else float("nan")

    @property
    def p90(self) -> float:
        return float(np.quantile(np.abs(self.errors), 0.9)) if len(self.errors) else float("nan")


def family(op: str) -> str:
    """gemm, conv, attention or memory."""
    return FAMILIES.get(op, "attention" if op == "attention" else "memory")


def measured(truth: Path) -> list[Measured]:
    """Every kernel reading of a truth folder on a device we know."""
    found = kernel_truth.read(truth)
    for folder in sorted(
        p for p in truth.glob("*") if p.is_dir() and any(p.glob("*.base.json.gz"))
    ):
        found += kernel_traces.read(folder)
    if not found:
        raise InputError(f"no kernel readings under `{truth}`", hint="name a truth folder")
    return [m for m in found if device_named(m.device) is not None and len(m)]


def priced(
    m: Measured, constants: Constants | None = None, clocks: Clocks | None = None
) -> tuple[Array, Array, Array]:
    """What the clock would show for each reading, and the ends of the stated 80 % interval."""
    clocks = clocks or kernel_clocks.shipped()
    device = device_named(m.device)
    assert device is not None
    ops = m.op if m.ops is None else m.ops.tolist()
    burst = kernel_clocks.burst(clocks, m)
    price = kernel.seconds(
        device, ops, m.dtype, m.shape, bytes=m.bytes, constants=constants, burst=burst
    )
    total: Array = np.bincount(m.reading, price.seconds, len(m)).astype(float)
    # kernels of one reading err together: the same formula on the same device
    spread = np.bincount(m.reading, price.seconds * price.sigma, len(m)) / total
    ends = (total * np.exp(sign * EIGHTY * spread) for sign in (-1, 1))
    shown = [kernel_clocks.reads(clocks, m, t) for t in (total, *ends)]
    return shown[0], shown[1], shown[2]


def accuracy(truth: Path, constants: Constants | None = None) -> list[Accuracy]:
    """The shipped constants (or others) against every reading of a truth folder."""
    return [_accuracy(m, constants or constants_shipped()) for m in measured(truth)]


def _accuracy(m: Measured, constants: Constants) -> Accuracy:
    device = device_named(m.device)
    assert device is not None
    clocks = kernel_clocks.shipped()
    shown, low, high = priced(m, constants, clocks)
    errors = shown / m.seconds - 1
    seen = kernel_clocks.sees(clocks, m)
    inside = (m.seconds >= low * (1 - 1e-9)) & (m.seconds <= high * (1 + 1e-9))
    return Accuracy(
        source=m.source,
        device=m.device,
        chip=chip(device),
        op=m.op,
        dtype=m.dtype,
        seconds=m.seconds[seen],
        errors=errors[seen],
        covered=float(inside[seen].mean()) if seen.any() else float("nan"),
        hidden=int((~seen).sum()),
        hidden_error=float(np.median(np.abs(errors[~seen]))) if (~seen).any() else float("nan"),
    )


def by_size(rows: Iterable[Accuracy]) -> Iterator[tuple[str, str, int, float, float]]:
    """Family, size, readings, median and 90th percentile of the error."""
    pooled: dict[tuple[str, int], list[Array]] = defaultdict(list)
    for row in rows:
        for i, (low, high) in enumerate(SIZES):
            pooled[row.family, i].append(row.errors[(row.seconds >= low) & (row.seconds < high)])
    for (name, i), parts in sorted(pooled.items()):
        errors = np.abs(np.concatenate(parts))
        if len(errors):
            p90 = float(np.quantile(errors, 0.9))
            yield name, _SIZE_NAMES[i], len(errors), float(np.median(errors)), p90


def held_out() -> dict[str, Any]:
    """Errors on rows left out of fits, as recorded when the constants were made."""
    text = files("foretell.cost").joinpath("tables", "kernel_accuracy.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def lines(rows: list[Accuracy]) -> Iterator[str]:
    """The report, line by line."""
    yield "shipped constants on all rows (most were in the fit)"
    head = ("source", "device", "op", "dtype", "seen", "hidden", "median", "p90", "bias", "in 80 %")
    yield _line(*head)
    for r in sorted(rows, key=lambda r: (r.family, r.source, r.device, r.op, r.dtype)):
        bias = float(np.median(r.errors)) if len(r.errors) else float("nan")
        figures = (f"{x:.1%}" for x in (r.median, r.p90, bias, r.covered))
        yield _line(r.source, r.device, r.op, r.dtype, str(len(r.errors)), str(r.hidden), *figures)
    yield ""
    yield _line("op", "measured", "readings", "median", "p90")
    for name, size, count, median, p90 in by_size(rows):
        yield _line(name, size, str(count), f"{median:.1%}", f"{p90:.1%}")
    yield from _held_out_lines(held_out())
    yield from _learned_lines(held_out())


def _held_out_lines(found: dict[str, Any]) -> Iterator[str]:
    for what, title in (("chips", "chip"), ("sizes", "range")):
        yield ""
        yield f"constants fitted without that {title} (rows not used in the fit)"
        yield _line("op", title, "readings", "median", "p90", "in 80 %")
        for row in found[what]:
            figures = (f"{row[k]:.1%}" for k in ("median", "p90", "covered"))
            yield _line(row["op"], row["out"], str(row["readings"]), *figures)
    yield ""
    yield "all rows left out, each group of readings counted alike"
    yield _line("op", "left out", "readings", "median", "p90", "in 80 %")
    for row in found["summary"]:
        figures = (f"{row[k]:.1%}" for k in ("median", "p90", "covered"))
        yield _line(row["op"], row["out"], str(row["readings"]), *figures)


def _learned_lines(found: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "the correction on ranges of shape left out of its training (the formula saw them)"
    yield _line("", "device, op, format", "left out", "formula", "learned", "ships")
    for row in found["learned"]:
        ships = "yes" if row["kept"] else "no"
        figures = (f"{row[k]:.1%}" for k in ("formula", "learned"))
        yield _line("", row["name"], str(row["left_out"]), *figures, ships)


def _line(*words: str) -> str:
    widths = (15, 24, 20, 8, 9, 9, 9, 9, 9, 9)
    return " ".join(w.ljust(n) for w, n in zip(words, widths, strict=False)).rstrip()


def report(truth: Path) -> dict[str, Any]:
    """The rows and the figures of left-out rows: as values and as text."""
    found = accuracy(truth)
    rows = [
        {
            "source": r.source,
            "device": r.device,
            "op": r.op,
            "dtype": r.dtype,
            "readings": len(r.errors),
            "median": r.median,
            "p90": r.p90,
            "covered": r.covered,
        }
        for r in found
    ]
    return {"rows": rows, "held_out": held_out(), "text": "\n".join(lines(found))}


def main(arguments: list[str]) -> None:
    """Print the report for a truth folder."""
    print(report(truth_folder(Path(arguments[0]) if arguments else None))["text"])


if __name__ == "__main__":
    main(sys.argv[1:])
