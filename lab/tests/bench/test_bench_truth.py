"""The shipped H200 table against kernels in traces of real training steps on such a device.

Only shapes that stand in both are compared: the sweep was not made from these traces.
"""

import gzip
import json
import statistics
from collections import defaultdict
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from foretell_lab.bench import load

TRUTH = Path(__file__).resolve().parents[3].parent / "shared" / "truth" / "h200"
DTYPES = {"float": "fp32", "c10::BFloat16": "bf16"}

pytestmark = [
    pytest.mark.truth,
    pytest.mark.skipif(not TRUTH.exists(), reason="measured traces are not here"),
]


def case_of(op: dict[str, Any]) -> str | None:
    """The case an operator of a trace is, where the table has such cases."""
    name, args = op["name"], op["args"]
    dims, types, strides = (args.get(f"Input {k}", []) for k in ("Dims", "type", "Strides"))
    dtype = DTYPES.get(types[1] if name == "aten::addmm" else types[0]) if types else None
    if name == "aten::addmm":
        (m, k), n = dims[1], dims[2][1]
        return f"linear forward {dtype} {'nk' if strides[2][0] == 1 else 'kn'} m={m};n={n};k={k}"
    if name == "aten::mm" and strides[0][1] == 1 and strides[1][1] == 1:
        return f"linear dgrad {dtype} nk m={dims[0][0]};n={dims[0][1]};k={dims[1][1]}"
    if name == "aten::mm" and strides[0][0] == 1 and strides[1][1] == 1:
        return f"linear wgrad {dtype} nk m={dims[0][1]};n={dims[0][0]};k={dims[1][1]}"
    if name == "aten::cudnn_convolution":
        (n, c, h, w), (k, each, r, s) = dims[0], dims[1]
        stride = args["Concrete Inputs"][3].strip("[]").split(",")[0]
        sizes = f"n={n};c={c};k={k};r={r};s={s};stride={stride};groups={c // each};h={h};w={w}"
        return f"conv2d forward {dtype} nchw {sizes}"
    if name.endswith(("batch_norm", "batch_norm_backward")) and len(dims[0]) == 4:
        way = "backward" if name.endswith("backward") else "forward"
        return f"batch_norm {way} {dtype} nchw " + ";".join(
            f"{k}={v}" for k, v in zip("nchw", dims[0], strict=True)
        )
    return None


def traced(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Kernels and device seconds of every call, by case."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ops = {e["args"].get("External id"): e for e in events if e.get("cat") == "cpu_op"}
    spent: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"):
            spent[event["args"].get("External id")].append(event["dur"] * 1e-6)
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for number, took in spent.items():
        query = case_of(ops[number]) if number in ops else None
        if query:
            found[query].append((len(took), sum(took)))
    return found


@pytest.mark.parametrize(("every", "least"), [(4, 15), pytest.param(1, 80, marks=pytest.mark.slow)])
def test_the_table_agrees_with_traces_of_training_steps(every: int, least: int) -> None:
    file = resources.files("foretell.cost") / "tables" / "measured" / "h200.csv.gz"
    with resources.as_file(file) as path:
        table = {str(row.case): row for row in load(path)}
    ratios, mine, theirs = [], 0.0, 0.0
    for path in sorted(TRUTH.glob("*.json.gz"))[::every]:
        for query, calls in traced(path).items():
            row = table.get(query)
            same = [seconds for count, seconds in calls if row and count == row.kernels]
            if row and same and statistics.median(same) > 2e-5:
                ratios.append(row.seconds / statistics.median(same))
                mine, theirs = mine + row.seconds * len(same), theirs + sum(same)
    assert len(ratios) > least
    assert mine / theirs == pytest.approx(1.0, abs=0.03)
    off = sorted(abs(r - 1) for r in ratios)
    assert off[len(off) // 2] < 0.03
    assert off[int(0.9 * len(off))] < 0.12
