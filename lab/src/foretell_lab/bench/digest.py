"""What a measured table tells, in Markdown: shares of the ceilings, ratios, host costs, repeats.

    share      work (→ `work.work`) over time, against the best rate the machine showed
    ratio      median over pairs of rows that differ in one thing (→ `ratios`)

A cell is a median over at least three rows, or empty.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell_lab.bench import ratios
from foretell_lab.bench.case import work
from foretell_lab.bench.table import Row, load, load_header

Line = Sequence[str]
Cells = dict[str, dict[str, list[float]]]  # values by line and column
_FEW = 3
_DENSE = ("linear", "bmm", "conv2d", "conv3d", "attention")
_NO_STREAM = (*_DENSE, "convt2d", "lstm", "gru", "h2d", "d2h", "launch")
_LONG = 1e-4  # seconds on the device: what runs longer is bound by the device, not by its start


def summary(path: Path) -> str:
    """All tables of a measured table."""
    rows, header = load(path), load_header(path)
    rates = header.get("ceilings") or _best(rows)
    timed = [row for row in rows if row.seconds > 0]
    parts = [
        _machine(header, rows),
        "### Share of the measured matrix rate\n\n" + _dense(timed, rates),
        "### Share of the measured copy bandwidth\n\n" + _streams(timed, rates),
        "### Ratios of times\n\n" + _ratios(timed),
        "### Host cost of a call\n\n" + _host(rows),
        "### Optimizer steps\n\n" + _updates(timed),
        "### Copies across the bus\n\n" + _bus(timed),
    ]
    return "\n\n".join(parts) + "\n"


def table(head: Line, lines: Iterable[Line]) -> str:
    """A Markdown table."""
    ruled = [head, ["---"] + ["---:"] * (len(head) - 1), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in ruled)


def _machine(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    device, host = header.get("device", {}), header.get("host", {})
    ceilings = header.get("ceilings", {})
    lines = [
        f"{device.get('name', 'unknown device')}, torch {header.get('torch')}, CUDA"
        f" {header.get('cuda')}, cuDNN {header.get('cudnn')}; {host.get('cpu')},"
        f" {host.get('cores')} cores; {header.get('date')}; {len(rows)} rows.",
        f"Ceilings: {', '.join(f'{name} {_rate(name, rate)}' for name, rate in ceilings.items())}.",
    ]
    repeat = header.get("repeat", {})
    if repeat.get("cases"):
        shares = ", ".join(f"{100 * repeat[p]:.1f} % ({p})" for p in repeat if p != "cases")
        lines.append(f"{repeat['cases']} cases were measured twice; the two lie apart by {shares}.")
    within = sorted(row.spread for row in rows if row.seconds > 0)
    if within:
        middle, most = (100 * within[int(len(within) * q)] for q in (0.5, 0.9))
        lines.append(
            f"Quartiles of the repetitions of one case lie apart by {middle:.1f} % (p50),"
            f" {most:.1f} % (p90)."
        )
    return "\n\n".join(lines)


def _rate(name: str, value: float) -> str:
    return f"{value / 1e12:.2f} TB/s" if name == "bytes" else f"{value / 1e12:.3g} TFLOP/s"


def _best(rows: Sequence[Row]) -> dict[str, float]:
    """Ceilings where no header tells them: the best any row reached."""
    best: dict[str, float] = defaultdict(lambda: 1.0)
    for row in (row for row in rows if row.seconds > 0):
        least = work(row.case)
        best[row.case.dtype] = max(best[row.case.dtype], least.flops / row.seconds)
        best["bytes"] = max(best["bytes"], least.bytes / row.seconds)
    return best


def _dense(rows: Sequence[Row], rates: Mapping[str, float]) -> str:
    found: Cells = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.case.op not in _DENSE or row.case.dtype not in rates:
            continue
        flops, name = work(row.case).flops, _with_layout(row)
        if flops >= 1e9 and "depthwise" not in name:
            size = "1–10 GF" if flops < 1e10 else "> 10 GF"
            share = flops / row.seconds / rates[row.case.dtype]
            found[name][f"{row.case.dtype} {size}"].append(share)
    columns = [f"{d} {s}" for d in ("fp32", "tf32", "bf16") for s in ("1–10 GF", "> 10 GF")]
    return table(["work", *columns], _lines(found, columns, _percent))


def _with_layout(row: Row) -> str:
    shown = ("conv2d", "conv3d", "batch_norm")
    name = ratios.kind(row.case)
    return f"{name} {row.case.layout}" if row.case.op in shown else name


def _streams(rows: Sequence[Row], rates: Mapping[str, float]) -> str:
    found: Cells = defaultdict(lambda: defaultdict(list))
    for row in rows:
        name = _with_layout(row)
        if row.case.op in _NO_STREAM and "depthwise" not in name:
            continue
        name += f" {row.case.layout}" if row.case.direction == "step" else ""
        name += f" {row.case.dtype}" if row.case.op == "copy" else ""
        moved = work(row.case).bytes
        size = "1–10 MB" if moved < 1e7 else "10–100" if moved < 1e8 else "> 100 MB"
        dtype = row.case.dtype if row.case.dtype in ("bf16", "fp16") else "fp32"
        if moved >= 1e6:
            found[name][f"{dtype} {size}"].append(moved / row.seconds / rates["bytes"])
    sizes = ("1–10 MB", "10–100", "> 100 MB")
    columns = [f"{dtype} {size}" for dtype in ("fp32", "bf16") for size in sizes]
    return table(["work", *columns], _lines(found, columns, _percent))


def _ratios(rows: Sequence[Row]) -> str:
    changes: dict[str, Callable[[Any], Any]] = {
        "bf16/fp32": ratios.dtype_change("fp32", "bf16"),
        "tf32/fp32": ratios.dtype_change("fp32", "tf32"),
        "fp16/bf16": ratios.dtype_change("bf16", "fp16"),
        "nhwc/nchw fp32": ratios.layout_change("fp32"),
        "nhwc/nchw bf16": ratios.layout_change("bf16"),
        "2× batch": ratios.twice_the_batch,
    }
    found: Cells = defaultdict(lambda: defaultdict(list))
    for name, change in changes.items():
        for pair in ratios.pairs(rows, change):
            length = "long" if pair.seconds > _LONG else "short"
            found[pair.kind][f"{name} {length}"].append(pair.ratio)
    columns = [f"{name} {length}" for name in changes for length in ("short", "long")]
    text = "Short and long are under and over 0.1 ms in the first of the two.\n\n"
    return text + table(["work", *columns], _lines(found, columns, lambda v: f"{v:.2f}"))


def _lines(found: Cells, columns: Sequence[str], show: Callable[[float], str]) -> list[list[str]]:
    """One line a kind of work: medians, where there are enough values; lines of none left out."""
    lines = []
    for name, cells in sorted(found.items()):
        many = [cells.get(column, []) for column in columns]
        shown = [show(statistics.median(v)) if len(v) >= _FEW else "" for v in many]
        if any(shown):
            lines.append([name, *shown])
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _host(rows: Sequence[Row]) -> str:
    cost: dict[str, dict[tuple[str, str, str], Row]] = defaultdict(dict)
    for row in rows:
        if row.case.op.startswith("host."):
            c = row.case
            cost[c.op.removeprefix("host.")][c.direction, c.dtype, c.layout] = row
    columns = [(d, t, "-") for t in ("fp32", "amp_bf16") for d in ("forward", "backward")]
    columns += [(d, "fp32", "profiled") for d in ("forward", "backward")]
    head = ["µs (kernels)", "forward", "backward", "autocast fwd", "autocast bwd"]
    head += ["profiled fwd", "profiled bwd"]
    lines = [[name, *(_micro(of.get(at)) for at in columns)] for name, of in sorted(cost.items())]
    return table(head, lines)


def _micro(row: Row | None) -> str:
    if row is None or math.isnan(row.host):
        return ""
    return f"{1e6 * row.host:.1f} ({row.kernels})" if row.kernels else f"{1e6 * row.host:.1f}"


def _updates(rows: Sequence[Row]) -> str:
    ways = ("forloop", "foreach", "fused")
    found: dict[tuple[str, int, int], dict[str, str]] = defaultdict(dict)
    for row in rows:
        c = row.case
        if c.direction == "step" and c.op in ("momentum", "adam"):
            host = "" if math.isnan(row.host) else f", host {1e3 * row.host:.2f}"
            found[c.op, c["total"], c["count"]][c.layout] = f"{1e3 * row.seconds:.3f}{host}"
    lines = [
        [f"{op}, {count} tensors, {total / 1e6:.1f} M", *(of.get(way, "") for way in ways)]
        for (op, total, count), of in sorted(found.items())
    ]
    return table(["device ms, host ms", *ways], lines)


def _bus(rows: Sequence[Row]) -> str:
    found: Cells = defaultdict(lambda: defaultdict(list))
    columns = ("< 0.1 MB", "0.1–10 MB", "> 10 MB")
    for row in (row for row in rows if row.case.op in ("h2d", "d2h")):
        moved = work(row.case).bytes
        column = columns[sum(moved >= edge for edge in (1e5, 1e7))]
        found[f"{row.case.op} {row.case.layout}"][column].append(moved / row.seconds / 1e9)
    return table(["GB/s", *columns], _lines(found, columns, lambda v: f"{v:.1f}"))
