"""Fit the host constants of `foretell.cost.host` to the `host.*` rows of a measured table.

    python benchmarks/fit_host.py [--table src/foretell/cost/tables/measured/h200.csv.gz]

Every chain of calls that the table timed is captured, so what the host issued is known; constants
that are never negative are fitted to the seconds a call (relative errors, robustly), and what they
say of each row is printed beside what was measured. Copy what it prints into `cost/host.py`.
"""

import argparse
import csv
import gzip
from collections import Counter, defaultdict
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import nnls

from foretell.graph import Phase
from foretell.pytorch.bench.call import Place
from foretell.pytorch.bench.chains import LENGTH, chain, empty, kinds
from foretell.pytorch.capture import gpu
from foretell.pytorch.capture.assume import Assumed
from foretell.pytorch.capture.choices import chosen
from foretell.pytorch.capture.record import Recorder, Row
from foretell.pytorch.capture.step import movable

TABLE = Path(__file__).parents[1] / "src/foretell/cost/tables/measured/h200.csv.gz"
MANY = 2  # kinds of call an operator must be in (or a chain of its own) to have a cost of its own
OWN = {
    *("addmm", "mm", "bmm", "convolution", "convolution_backward", "native_batch_norm"),
    *("native_batch_norm_backward", "native_layer_norm", "native_layer_norm_backward"),
    *("native_group_norm", "native_dropout", "copy_", "embedding", "embedding_dense_backward"),
    *("cat", "sum", "mean", "index", "index_put", "_efficient_attention_forward"),
    *("_efficient_attention_backward", "_cudnn_attention_forward", "_cudnn_attention_backward"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, default=TABLE)
    measured = read(parser.parse_args().table)
    rows, names = [], set()
    kept = [kind for kind in kinds() if kind != "module.identity"]  # too short to be told apart
    for kind in kept:
        for dtype in ("fp32", "amp_bf16"):
            for direction, counts in issued(kind, dtype).items():
                key = (f"host.{kind}", direction, dtype)
                if key in measured:
                    rows.append((key, counts, measured[key]))
                    names |= set(counts)
    fit(rows, sorted(names))


def read(path: Path) -> dict[tuple[str, str, str], float]:
    """Seconds a call of every chain that was timed without a profiler."""
    found = csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines())
    return {
        (row["op"], row["direction"], row["dtype"]): float(row["host_seconds"])
        for row in found
        if row["op"].startswith("host.") and row["layout"] == "-" and row["host_seconds"]
    }


def issued_raw(kind: str, dtype: str) -> dict[str, Counter[str]]:
    """What a whole chain makes the host issue."""
    with gpu.pretended(gpu.GPU), gpu.fake_mode(gpu.GPU):
        recorder = Recorder({}, Assumed(None), gpu.GPU)
        with recorder, chosen("hopper", lambda: None), _alone(), recorder.watching_modules():
            with movable():
                calls = chain(kind, Place(gpu.GPU)) if kind else empty(Place(gpu.GPU))
            start = calls.enter()
            recorder.phase = Phase.FORWARD
            amp = torch.autocast("cuda", torch.bfloat16) if dtype == "amp_bf16" else nullcontext()
            with amp:
                end = calls.flow(start)
            recorder.phase = Phase.NONE
            total = end.float().sum()
            recorder.phase = Phase.BACKWARD
            total.backward()
            recorder.phase = Phase.NONE
    counts = {"forward": Counter[str](), "backward": Counter[str]()}
    for row in recorder.rows:
        counts["backward" if row.phase == Phase.BACKWARD else "forward"].update(features(row))
    if kind:  # the table leaves out what a chain of no calls takes
        counts = {way: counts[way] - c for way, c in issued_raw("", dtype).items()}
    return counts


def issued(kind: str, dtype: str) -> dict[str, Counter[str]]:
    """What one call of a chain makes the host issue, forward and backward."""
    counts = issued_raw(kind, dtype)
    return {way: Counter({k: v / LENGTH for k, v in c.items()}) for way, c in counts.items()}


def _alone() -> torch.autograd.set_multithreading_enabled:
    return torch.autograd.set_multithreading_enabled(False)


def features(row: Row) -> Counter[str]:
    """What of the model's terms an operator counts for."""
    way = row.direction
    found = Counter({"modules": row.modules, "nodes": row.nodes})
    if not row.parts:
        found[f"view {way}"] += 1
    elif row.op in OWN:
        found[f"{row.op} {way}"] += 1
    else:
        found[f"kernel {way}"] += 1
    return Counter({k: v for k, v in found.items() if v})


def fit(rows: list[tuple[tuple[str, str, str], Counter[str], float]], names: list[str]) -> None:
    """Relative least squares, twice more with what is far off counting less."""
    asked = np.array([[counts.get(name, 0.0) for name in names] for _, counts, _ in rows])
    took = np.array([seconds for _, _, seconds in rows])
    weight = 1 / took
    for _ in range(3):
        found, _ = nnls(asked * weight[:, None], took * weight)
        off = np.abs(asked @ found / took - 1)
        weight = 1 / took / np.sqrt(1 + (off / 0.15) ** 2)
    for name, value in zip(names, found, strict=True):
        print(f"{name:40s} {value * 1e6:7.1f} µs")
    told = asked @ found
    by = defaultdict(list)
    for (key, _, seconds), said in zip(rows, told, strict=True):
        print(f"  {key[0]:28s}{key[1]:9s}{key[2]:9s} {seconds * 1e6:7.1f} {said * 1e6:7.1f}")
        by[key[1]].append(said / seconds - 1)
    for way, errors in by.items():
        print(f"{way}: median error {np.median(np.abs(errors)):.1%}, bias {np.median(errors):+.1%}")


if __name__ == "__main__":
    main()
