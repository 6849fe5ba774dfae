"""Fit the host constants of `foretell.cost.price` to the `host.*` rows of a measured table.

    python benchmarks/fit_host.py [--table src/foretell/cost/tables/measured/h200.csv.gz]
    python benchmarks/fit_host.py --kinds      # needs torchvision and transformers

Every chain of calls that the table timed is captured, so what the host issued is known; constants
that are never negative are fitted to the seconds a call (relative errors, robustly), and what they
say of each row is printed beside what was measured. Copy what it prints into `cost/host.toml`.

`--kinds` spreads what those constants say of captured steps over the kernels that a workload's
description counts, by kind of kernel, for the models of `FITTED`, and holds it against the host
time of the steps in `measured/host_steps_h200.json`, of those models and of the ones kept out.
"""

import argparse
import csv
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from foretell.graph import Phase
from foretell.pytorch.capture import gpu
from foretell.pytorch.capture.gpu import chosen
from foretell.pytorch.capture.record import Recorder, Row
from foretell.pytorch.capture.step import movable
from foretell.pytorch.capture.values import Values
from foretell_lab.bench.call import Place
from foretell_lab.bench.host import LENGTH, chain, empty, kinds

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
    parser.add_argument("--kinds", action="store_true")
    given = parser.parse_args()
    if given.kinds:
        kinds_of_kernels()
        return
    measured = read(given.table)
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
        recorder = Recorder({}, Values(), gpu.GPU)
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
    options = np.array([[counts.get(name, 0.0) for name in names] for _, counts, _ in rows])
    took = np.array([seconds for _, _, seconds in rows])
    weight = 1 / took
    for _ in range(3):
        found, _ = nnls(options * weight[:, None], took * weight)
        off = np.abs(options @ found / took - 1)
        weight = 1 / took / np.sqrt(1 + (off / 0.15) ** 2)
    for name, value in zip(names, found, strict=True):
        print(f"{name:40s} {value * 1e6:7.1f} µs")
    answer = options @ found
    by = defaultdict(list)
    for (key, _, seconds), said in zip(rows, answer, strict=True):
        print(f"  {key[0]:28s}{key[1]:9s}{key[2]:9s} {seconds * 1e6:7.1f} {said * 1e6:7.1f}")
        by[key[1]].append(said / seconds - 1)
    for way, errors in by.items():
        print(f"{way}: median error {np.median(np.abs(errors)):.1%}, bias {np.median(errors):+.1%}")


STEPS = Path(__file__).parent / "measured/host_steps_h200.json"
FITTED = ("resnet50", "vit_b_16", "densenet121", "vgg16", "resnet18", "swin_t")
WORKLOADS = {
    **{name: name for name in (*FITTED, "mobilenet_v2", "efficientnet_b0", "t5_small")},
    "bert_base": "bert:head=mlm,layers=12,hidden=768,heads=12,vocab=30522,seq=64",
    "gpt2": "gpt:layers=12,hidden=768,heads=12,seq=128,vocab=50257,dropout=yes,tanh=yes",
}
KINDS = ("conv", "batch_norm", "gemm", "norm", "attention", "copy", "other")
# What the constants of single operators make of each, forward and backward: where rows do not say.
GUESS = (
    (41.8e-6, 77.2e-6, 47.2e-6, 34.2e-6, 90.4e-6, 25.3e-6, 21.2e-6),
    (50.9e-6, 70.6e-6, 48.4e-6, 51.7e-6, 114.7e-6, 32.6e-6, 23.4e-6),
)
TRUST = 0.15  # of a guess against a step's row


def kinds_of_kernels() -> None:
    """Seconds a kernel of each kind, and both halves of the measured models."""
    ways = {"fp32": "", "bf16-mixed": "bf16"}
    options = {
        (m, w): (described(m, w), captured(m, a)) for m in WORKLOADS for w, a in ways.items()
    }
    found = []
    for way, name in enumerate(("forward", "backward")):
        rows = [
            [c[way][k] / t[way] for k in KINDS] for (m, _), (c, t) in options.items() if m in FITTED
        ]
        held = np.diag(TRUST / np.array(GUESS[way]))
        wanted = np.concatenate([np.ones(len(rows)), np.full(len(KINDS), TRUST)])
        found.append(nnls(np.vstack([rows, held]), wanted)[0])
        print(name, {k: f"{1e6 * v:.1f} µs" for k, v in zip(KINDS, found[-1], strict=True)})
    steps = [r for r in json.loads(STEPS.read_text())["rows"] if r["part"] == "host"]
    for is_fitted in (True, False):
        errors = []
        for (model, way), (counts, _) in options.items():
            mine = [r for r in steps if r["model"] == model and r["way"].split()[0] == way]
            mine = [r for r in mine if "nhwc" not in r["way"]]
            if (model in FITTED) == is_fitted and mine:
                answer = sum(
                    counts[w][k] * v for w in (0, 1) for k, v in zip(KINDS, found[w], strict=True)
                )
                took = sum(np.median([r[f"{w}_s"] for r in mine]) for w in ("forward", "backward"))
                errors.append(answer / took - 1)
                print(f"  {model:18s}{way:12s}{1e3 * took:7.1f} ms {1e3 * answer:7.1f}")
        word = "fitted" if is_fitted else "kept out"
        print(
            f"{word}: median error {np.median(np.abs(errors)):.1%}, bias {np.median(errors):+.1%}"
        )


def described(model: str, precision: str) -> tuple[Counter[str], Counter[str]]:
    """Kernels by kind, forward and backward, that a workload's description counts."""
    from foretell.cost.price import call_kind as kind_of
    from foretell.plan import Plan
    from foretell.plan.layer_cost import BACKWARD, FORWARD, _wanted, layouts
    from foretell.workload import load

    plan = Plan.parse(f"dp=1,micro_batch=2,global_batch=2,precision={precision},framework=ddp")
    cells = layouts([plan])
    found = Counter[str](), Counter[str]()
    for layer in load(WORKLOADS[model]).layers:
        for phase, call in _wanted(layer, cells.runs[0], cells):
            if phase in (FORWARD, BACKWARD):
                found[phase][kind_of(call.op)] += layer.times * float(np.max(call.times))
    return found


def _step(name: str) -> tuple[Callable[..., Any], ...]:
    """How to make a model, its batch and its loss."""
    import torchvision
    import transformers as hf

    words: dict[str, Callable[[], Any]] = {
        "bert_base": lambda: hf.BertForMaskedLM(hf.BertConfig()),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False)),
        "t5_small": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(use_cache=False, decoder_start_token_id=0)
        ),
    }
    if name in words:
        batch = partial(torch.randint, 0, 30000, (2, 64))
        return words[name], batch, lambda m, x: m(input_ids=x, labels=x).loss
    return (
        partial(torchvision.models.get_model, name, weights=None),
        lambda: (torch.randn(2, 3, 224, 224), torch.randint(1000, (2,))),
        lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]),
    )


def captured(model: str, autocast: str) -> tuple[float, float]:
    """Host seconds of a captured step, forward and backward, as `foretell.cost.price` says."""
    from foretell.cluster import load
    from foretell.cost import price
    from foretell.graph import Kind
    from foretell.pytorch.capture import capture

    graph = price(capture(*_step(model), "sgd", autocast=autocast), load("h200"))
    host = graph.kind == Kind.HOST
    back = host & (graph.phase == Phase.BACKWARD)
    ahead = host & np.isin(graph.phase, (Phase.FORWARD, Phase.LOSS))
    return float(graph.seconds[ahead].sum()), float(graph.seconds[back].sum())


if __name__ == "__main__":
    main()
