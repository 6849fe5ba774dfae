"""Rows of the table of measured operators from steps that were traced in fp32 and under autocast.

    python benchmarks/trace_rows.py TABLE FOLDER/MODEL...

Reads FOLDER/MODEL.base.json.gz and FOLDER/MODEL.amp_bf16.json.gz and writes the device time of
each convolution over volumes or lines or of many taps and each recurrent layer that both have, fp32
and bf16, in the columns of `foretell bench`: kinds of which its own sweep has few. The two
gradients of a convolution are told apart by the names and the order of their kernels.

`cost/tables/traced_h200.csv.gz` was made of slowfast (benchmarks/measured/blind), cosmoflow and
rnnlm (../shared/truth/h200_2), rnnlm (benchmarks/measured/h200/half), wav2vec2, speech_gru,
wavenet, whisper and state_space (traced in fp32 in benchmarks/measured/kinds and further; their
autocast traces are not kept), and has the rows of a later sweep of volumes, 1-D convolutions, end
layers and recurrent stacks (`foretell_lab.bench`; a stack of both directions has twice its layers)
and of `benchmarks/rare_kernels.py` (161 rows on an H200; asked for 760).
"""

from __future__ import annotations

import csv
import gzip
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from foretell.graph.graph import Graph
from foretell.trace import read
from foretell.whatif.calls import launch_of, operators
from foretell.whatif.table_lookup import KernelGroup, kernel_groups, layout_of

OPS = ("conv3d", "lstm", "gru")
MANY = 49  # taps of a filter
COLUMNS = ("op", "direction", "dtype", "layout", "shape", "device_seconds", "spread", "kernels")
DGRAD, WGRAD = re.compile("dgrad"), re.compile("wgrad")


def rows(path: str) -> Iterator[tuple[str, ...]]:
    """Every operator of a model that both traces have."""
    plain, half = (read(Path(f"{path}.{v}.json.gz")).graph for v in ("base", "amp_bf16"))
    later = {_key(s): s for s in kernel_groups(half)}
    for sort in kernel_groups(plain):
        other = later.get(_key(sort))
        if _is_rare(sort) and other is not None and other.calls == sort.calls > 0:
            for dtype, graph, own in (("fp32", plain, sort), ("bf16", half, other)):
                layout = layout_of(plain, sort) if sort.rows[0][0].startswith("conv") else "-"
                shape = ";".join(f"{k}={v:g}" for k, v in sort.sizes.items())
                for (op, direction), (seconds, count) in _parts(graph, own):
                    yield op, direction, dtype, layout, shape, f"{seconds:.4g}", "", f"{count:.0f}"


def _is_rare(sort: KernelGroup) -> bool:
    op, sizes = sort.rows[0][0], sort.sizes
    is_line = op == "conv2d" and sizes.get("h", 1) == 1
    return op in OPS or is_line or (op == "conv2d" and sizes["r"] * sizes["s"] > MANY)


def _key(sort: KernelGroup) -> tuple[str, ...]:
    return sort.op, str(sort.rows), str(sort.sizes), str(sort.phase)


def _parts(graph: Graph, sort: KernelGroup) -> list[tuple[tuple[str, str], tuple[float, float]]]:
    """Seconds and kernels of one call for each row of the table that a sort stands for."""
    if len(sort.rows) == 1:
        whole = float(graph.seconds[sort.kernels].sum()), float(len(sort.kernels))
        return [(sort.rows[0], (whole[0] / sort.calls, whole[1] / sort.calls))]
    number = operators(graph)[launch_of(graph, sort.kernels)]
    found = np.zeros((2, 2))
    for call in np.unique(number).tolist():
        mine = sort.kernels[number == call]
        mine = mine[np.argsort(graph.order[mine], kind="stable")]
        cut = _cut([graph.names[int(n)] for n in graph.name[mine]])
        for part, tasks in enumerate((mine[:cut], mine[cut:])):
            found[part] += (float(graph.seconds[tasks].sum()), len(tasks))
    per_call = [(float(s), float(n)) for s, n in found / sort.calls]
    return list(zip(sort.rows, per_call, strict=True))


def _cut(names: list[str]) -> int:
    """Where the gradient of the filters begins, behind that of the data."""
    data = [k for k, name in enumerate(names) if DGRAD.search(name)]
    weight = [k for k, name in enumerate(names) if WGRAD.search(name)]
    if data:
        cut = data[-1] + 1
        while cut < len(names) and "nhwcToNchw" in names[cut]:
            cut += 1
        return cut
    if weight:
        cut = weight[0]
        while cut > 0 and re.search("nchwToNhwc|init_device|setTensor", names[cut - 1]):
            cut -= 1
        return cut
    return len(names) // 2


def main() -> None:
    table, *models = sys.argv[1:]
    lines = sorted({row for model in models for row in rows(model) if float(row[5]) > 0})
    with gzip.GzipFile(table, "wb", mtime=0) as out:
        text = "\n".join([",".join(COLUMNS), *(",".join(row) for row in lines)])
        out.write(text.encode() + b"\n")
    with gzip.open(table, "rt") as back:
        print(f"{sum(1 for _ in csv.DictReader(back))} rows of {len(models)} models")


if __name__ == "__main__":
    main()
