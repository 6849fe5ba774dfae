"""Layouts predicted against layouts run: rows of published and measured tables, each as a request.

A row is a workload, a cluster and a plan as a user would write them, and the seconds someone
measured. Settings that a table leaves out and its authors published elsewhere are noted beside it.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from foretell.cluster import Cluster
from foretell.cluster import load as load_cluster
from foretell.errors import InputError
from foretell.plan import Plan
from foretell.predict import predict_many
from foretell.workload import load


@dataclass(frozen=True)
class Request:
    """One measured row: what a user would have asked, and the answer."""

    group: str  # rows that are compared with each other: one model on one number of ranks
    workload: str
    on: str
    plan: Plan
    measured: float


@dataclass(frozen=True)
class Row:
    """One row predicted."""

    request: Request
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of what was predicted."""
        return self.predicted / self.request.measured - 1


def predicted(requests: list[Request]) -> list[Row]:
    """Every request answered; those of one workload on one cluster together."""
    groups: dict[tuple[str, str], list[int]] = {}
    for i, request in enumerate(requests):
        groups.setdefault((request.workload, request.on), []).append(i)
    found = [0.0] * len(requests)
    clusters: dict[str, Cluster] = {}
    for (workload, on), rows in groups.items():
        cluster = clusters.setdefault(on, load_cluster(on))
        plans = [requests[i].plan for i in rows]
        for i, one in zip(rows, predict_many(plans, load(workload), cluster), strict=True):
            found[i] = one.step
    return [Row(request, step) for request, step in zip(requests, found, strict=True)]


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a table of measurements."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", newline="") as file:
                return list(csv.DictReader(file))
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except OSError:
        raise InputError(f"no measurements at `{path}`") from None


def vtrain(truth: Path) -> Iterator[Request]:
    """1440 iterations of Megatron-DeepSpeed on 2, 4 and 8 A100 of one node."""
    for r in table(truth / "tables" / "vtrain_single_node.csv"):
        ranks = int(r["# GPUs"])
        on = "dgx-a100:nodes=1" if ranks == 8 else f"a100-80:gpus={ranks}"
        shape = f"layers={r['# layers']},hidden={r['hidden size']},heads={r['attention heads']}"
        plan = Plan(
            dp=int(r["data parallelism"]),
            tp=int(r["tensor parallelism"]),
            pp=int(r["pipeline parallelism"]),
            micro_batch=int(r["micro batch"]),
            global_batch=int(r["global batch"]),
            recompute="full",
            framework="megatron",
        )
        seconds = float(r["iteration time (ms)"]) / 1e3
        name = f"gpt:{shape},seq={r['sequence length']},vocab=51200"
        yield Request(f"{shape} on {ranks}", name, on, plan, seconds)


# Micro-batch and chunks of each model of table 1, by its billions of parameters: Megatron-LM's own
# scripts for the paper (examples/sc21/run_table_1.sh). Table 2 has no interleaving.
_SC21 = {1.7: (16, 1), 3.6: (16, 1), 7.5: (16, 1), 18.4: (8, 1), 39.1: (4, 1), 76.1: (2, 3)}
_SC21 |= {145.6: (2, 2), 310.1: (1, 2), 529.6: (1, 3), 1008.0: (1, 1)}
_SIZES = {174.6: (96, 12288, 96), 529.6: (105, 20480, 128)}  # layers, hidden, heads of table 2


def megatron(truth: Path) -> Iterator[Request]:
    """22 runs of the SC'21 paper (arXiv 2104.04473), 32 to 3072 A100 of Selene."""
    for r in table(truth / "tables" / "megatron_paper_tables.csv"):
        size, ranks = float(r["params_B"]), int(r["n_gpus"])
        layers, hidden, heads = _SIZES.get(size, (0, 0, 0))
        if r["layers"]:
            layers, hidden, heads = int(r["layers"]), int(r["hidden"]), int(r["heads"])
        plan = _sc21_plan(r, size)
        flops = _sc21_flops(layers, hidden, int(r["global_batch"]))
        seconds = flops / (ranks * float(r["tflops_per_gpu"]) * 1e12)
        name = f"gpt:layers={layers},hidden={hidden},heads={heads},seq=2048,vocab=51200"
        yield Request(f"{size}B on {ranks}", name, f"selene:nodes={ranks // 8}", plan, seconds)


def _sc21_plan(r: dict[str, str], size: float) -> Plan:
    micro, chunks = _SC21.get(size, (1, 1))
    if r["micro_batch"]:
        micro, chunks = int(r["micro_batch"]), 1
    sharded = "ZeRO" in r["schedule"]
    return Plan(
        dp=int(r["DP"]),
        tp=int(r["TP"]),
        pp=int(r["PP"]),
        zero=3 if sharded else 0,
        micro_batch=micro,
        global_batch=int(r["global_batch"]),
        recompute="full",
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        framework="deepspeed-zero3" if sharded else "megatron-lm",
    )


def _sc21_flops(layers: int, hidden: int, batch: int, seq: int = 2048, vocab: int = 51200) -> float:
    """What the paper counts (its equation 3): the second forward included."""
    more = 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96 * batch * seq * layers * hidden**2 * more


# Layers, hidden, heads of MPT by name (llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml).
_MPT = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12)}
_MPT |= {"1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32)}
_MPT |= {"13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64)}


def mosaic(truth: Path) -> Iterator[Request]:
    """139 runs of MPT under FSDP on 8 to 128 A100 (llm-foundry)."""
    for r in table(truth / "tables" / "mosaicml_llm_foundry_mpt_wide.csv"):
        ranks, seq, batch = int(r["# GPUs"]), int(r["SeqLen (T)"]), int(r["GlobalBatchSize"])
        layers, hidden, heads = _MPT[r["Model"]]
        card = "a100-80" if "80gb" in r["GPU"] else "a100-40"
        node = "dgx-a100" if card == "a100-80" else "dgx-a100-40"
        plan = Plan(
            dp=ranks,
            zero=3,
            micro_batch=int(r["MicroBatchSize"]),
            global_batch=batch,
            recompute="full" if r["Activation Checkpointing"] == "True" else "none",
            dtype="bf16",
            grad_dtype="bf16" if r["MP Mode"] == "PURE" else "fp32",
            framework="llm-foundry",
        )
        shape = f"layers={layers},hidden={hidden},heads={heads},seq={seq},vocab=50368"
        seconds = batch * seq / float(r["Throughput (T/s)"])
        name = f"gpt:{shape},dropout=no,dtype=bf16"
        on = f"{node}:nodes={ranks // 8}"
        yield Request(f"{r['Model']} {card} on {ranks}", name, on, plan, seconds)


def bigscience(truth: Path) -> Iterator[Request]:
    """18 runs of a 1.3-billion GPT on 8 V100 (BigScience, experiments/tr3m-1B3.md).

    Nothing was fitted to them, nor to this device. Two nodes of four as in Jean Zay.
    """
    name = "gpt:layers=24,hidden=2048,heads=16,seq=2048,vocab=50257"
    for r in table(truth / "tables" / "bigscience_perf_tables.csv"):
        if r["col_Speed"] in ("", "x"):
            continue
        plan = Plan(
            dp=int(r["col_DP"]),
            tp=int(r["col_TP"]),
            pp=int(r["col_PP"]),
            micro_batch=int(r["col_MBS"]),
            global_batch=512,
            recompute="full",
            framework="megatron-lm",
        )
        yield Request("1.3B on 8 V100", name, "abci:nodes=2", plan, float(r["col_Speed"]))


SOURCES: dict[str, Callable[[Path], Iterator[Request]]] = {
    "vtrain": vtrain,
    "megatron": megatron,
    "mosaic": mosaic,
    "bigscience": bigscience,
}
