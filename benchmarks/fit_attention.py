"""Fit the constants of fused attention to an H200: `benchmarks/fit_attention.py [PART] [--write]`.

`measured/h200/attention.csv` has PyTorch 2.11's two fused kernels (cuDNN, FlashAttention-2), bf16,
each timed with CUDA events, forward and backward; `cost/tables/measured/h200.csv.gz` its kernel for
fp32 (`efficient`), which is the constants `simt`. Every third shape is kept out of the fit
and scored; `--write` puts the constants into `cost/tables/kernel.toml`.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from foretell.cluster import load
from foretell.cost import kernel
from foretell.cost.kernel import Constants, shipped
from foretell.cost.kernel import write_constants as write

TABLE = Path(__file__).parent / "measured/h200/attention.csv"
WIDE = files("foretell.cost").joinpath("tables/measured/h200.csv.gz")
PARTS = {"tensor": "cudnn", "flash2": "flash2", "simt": "efficient"}
FORMATS = {"efficient": "fp32"}  # bf16 where not named
KNOBS = ("peak", "backward", "scores", "ahead", "behind", "edge", "deep")
SHORT = 1.5e-4  # seconds: below it the host that issues the kernel was timed


def rows(library: str) -> tuple[list[str], np.ndarray]:
    """Shapes and seconds of one library, forward and backward as rows of their own."""
    if library in FORMATS:
        return _wide(library)
    shapes, seconds = [], []
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            if row["library"] != library:
                continue
            same = f"b={row['b']},heads={row['heads']},sq={row['seq']},sk={row['seq']}"
            same += f",d={row['depth']},causal={row['causal']},flash2={int(library == 'flash2')}"
            for way, key in enumerate(("forward_s", "backward_s")):
                if float(row[key]) < SHORT:
                    continue
                shapes.append(f"{same},direction={way}")
                seconds.append(float(row[key]))
    return shapes, np.array(seconds)


def _wide(library: str) -> tuple[list[str], np.ndarray]:
    """The same of kernels for fp32, without those that add a mask."""
    shapes, seconds = [], []
    for row in csv.DictReader(io.StringIO(gzip.decompress(WIDE.read_bytes()).decode())):
        mine = row["op"] == "attention" and row["dtype"] == FORMATS[library]
        if not mine or row["layout"] != library or not row["device_seconds"]:
            continue
        sizes = dict(pair.split("=") for pair in row["shape"].split(";"))
        if "s" not in sizes or "mask" in sizes:
            continue
        same = f"b={sizes['b']},heads={sizes['h']},sq={sizes['s']},sk={sizes['s']},d={sizes['d']}"
        same += f",causal={sizes['causal']},dropout={sizes.get('dropout', 0)}"
        shapes.append(f"{same},direction={int(row['direction'] == 'backward')}")
        seconds.append(float(row["device_seconds"]))
    return shapes, np.array(seconds)


def errors(
    constants: Constants, shapes: list[str], seconds: np.ndarray, dtype: str = "bf16"
) -> np.ndarray:
    """ln(priced / measured) of each row."""
    device = load("h200").devices[0]
    priced = kernel.seconds(device, "attention", dtype, shapes, constants=constants).seconds
    return np.log(priced / seconds)


def fitted(
    constants: Constants, part: str, shapes: list[str], seconds: np.ndarray, dtype: str
) -> Constants:
    """Constants with the least sum of absolute logarithms."""

    def made(at: np.ndarray) -> Constants:
        table = dict(constants.attention)
        values = dict(zip(KNOBS, np.exp(at).tolist(), strict=True))
        table[part] = {**table[part], **values}
        return replace(constants, attention=table)

    start = np.log([max(constants.attention[part][k], 1e-3) for k in KNOBS])
    simplex = np.vstack([start, start + 0.5 * np.eye(len(start))])  # also from a logarithm of 0
    best = minimize(
        lambda at: float(np.abs(errors(made(at), shapes, seconds, dtype)).mean()),
        start,
        method="Nelder-Mead",
        options={"maxiter": 1500, "xatol": 1e-3, "fatol": 1e-5, "initial_simplex": simplex},
    )
    return made(best.x)


def main() -> None:
    """Fit, say how well rows that were kept out are priced, and write where asked."""
    constants = shipped()
    wanted = [name for name in sys.argv[1:] if name in PARTS] or list(PARTS)
    for part, library in ((name, PARTS[name]) for name in wanted):
        shapes, seconds = rows(library)
        dtype = FORMATS.get(library, "bf16")
        heads = [shape.partition(",direction")[0] for shape in shapes]  # both ways stay together
        out = np.unique(heads, return_inverse=True)[1] % 3 == 0
        mine = [s for s, is_out in zip(shapes, out, strict=True) if not is_out]
        constants = fitted(constants, part, mine, seconds[~out], dtype)
        error = np.abs(np.expm1(errors(constants, shapes, seconds, dtype)))
        for name, which in (("fitted", ~out), ("kept out", out)):
            median, ninety = np.percentile(error[which], (50, 90))
            print(f"{library:7} {name:9} n={which.sum():3} median {median:.1%} p90 {ninety:.1%}")
    if "--write" in sys.argv:
        text = write(constants)
        Path(str(files("foretell.cost").joinpath("tables/kernel.toml"))).write_text(text)


if __name__ == "__main__":
    main()
