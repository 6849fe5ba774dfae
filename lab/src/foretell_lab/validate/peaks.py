"""Peak memory predicted against the peak bytes that Megatron-LM's own test runs print.

The runs log the memory of their last rank, which is on the last pipeline stage. Arguments are read
as the runs gave them; what has no counterpart here is left out and counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.cluster import load as load_cluster
from foretell.errors import ForetellError
from foretell.plan import Plan, memory
from foretell.workload import load
from foretell_lab.validate.layouts import table

WORDS = 50257  # GPT-2's vocabulary, with which the runs tokenize unless they say otherwise
RANKS = 8


@dataclass(frozen=True)
class Run:
    """One test run: what it was and the most bytes its last rank held."""

    name: str
    family: str
    workload: str
    plan: Plan
    measured: float


def runs(truth: Path) -> tuple[list[Run], int]:
    """Every run that can be asked about, and how many cannot."""
    rows = table(truth / "tables" / "megatron_lm_golden_values.csv")
    found = [_run(r) for r in rows if not reason(r)]
    known = [run for run in found if run is not None]
    return known, len(rows) - len(known)


def left_out(truth: Path) -> Counter[str]:
    """Why runs cannot be asked about, and how many each reason has."""
    rows = table(truth / "tables" / "megatron_lm_golden_values.csv")
    return Counter(why for why in map(reason, rows) if why)


def reason(r: dict[str, str]) -> str:
    """Why nothing can be predicted of a run, empty where something can."""
    more: dict[str, Any] = json.loads(r["other_args"] or "{}")
    if not r["mem_max_allocated_bytes_last"]:
        return "print no peak"
    if "hybrid-layer-pattern" in more:
        return "have Mamba layers, which no family here has"
    if "multi-latent-attention" in more:
        return "have latent attention, which no family here has"
    if r["family"] not in _MAKES:
        return "have a vision tower whose sizes they do not say"
    if not all(r[key] for key in _NEEDED):
        return "say neither their batch nor how many ranks shared the optimizer's state"
    return ""


def predicted(run: Run) -> float:
    """Bytes at the peak of the last rank."""
    cluster = load_cluster(f"a100-80:gpus={run.plan.ranks}")
    return float(memory(run.plan, load(run.workload), cluster)[-1].peak[0])


def rows(truth: Path) -> Iterator[tuple[Run, float]]:
    """Every run with what is predicted of it."""
    for run in runs(truth)[0]:
        yield run, predicted(run)


def _run(r: dict[str, str]) -> Run | None:
    more: dict[str, Any] = json.loads(r["other_args"] or "{}")
    workload = _workload(r, more)
    try:
        plan = _plan(r, more)
        load(workload)
    except ForetellError:
        return None
    peak = float(r["mem_max_allocated_bytes_last"])
    return Run(r["test_case"], r["family"], workload, plan, peak)


def _workload(r: dict[str, str], more: dict[str, Any]) -> str:
    """The spec of a run's model."""
    common = {"hidden": r["hidden-size"], "heads": r["num-attention-heads"], "dtype": _dtype(r)}
    family, options = _MAKES[r["family"]](r, more)
    return f"{family}:" + ",".join(f"{k}={v}" for k, v in (common | options).items())


def _dtype(r: dict[str, str]) -> str:
    return "bf16" if r["bf16"] else "fp16" if r["fp16"] else "fp32"


def _gpt(r: dict[str, str], more: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    rotary = more.get("position-embedding-type") == "rope"
    return "gpt", {
        "layers": r["num-layers"],
        "inner": r["ffn-hidden-size"] or "0",
        "seq": r["seq-length"],
        "vocab": more.get("vocab-size", WORDS),
        "tied": "no" if r["untie-embeddings-and-output-weights"] else "yes",
        "dropout": "no" if float(more.get("hidden-dropout", 0.1)) == 0 else "yes",
        "positions": 1 if rotary else r["max-position-embeddings"] or 0,
    }


def _moe(r: dict[str, str], more: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    words = 32000 if r["family"] == "mixtral" else WORDS
    return "moe", {
        "layers": r["num-layers"],
        "groups": r["num-query-groups"] or r["num-attention-heads"],
        "experts": r["num-experts"],
        "top": r["moe-router-topk"],
        "inner": r["ffn-hidden-size"] or 4 * int(r["hidden-size"]),
        "gated": "yes" if r["swiglu"] else "no",
        "seq": r["seq-length"],
        "vocab": more.get("vocab-size", words),
        "dropout": "no" if float(more.get("hidden-dropout", 0.1)) == 0 else "yes",
        "tied": "no" if r["untie-embeddings-and-output-weights"] else "yes",
    }


def _bert(r: dict[str, str], more: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    sizes = {"layers": r["num-layers"], "seq": r["seq-length"]}
    return "bert", sizes | {"positions": r["max-position-embeddings"], "head": "pretrain"}


def _t5(r: dict[str, str], more: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "t5", {
        "layers": more.get("encoder-num-layers", 12),
        "depth": r["kv-channels"],
        "inner": r["ffn-hidden-size"],
        "seq": r["encoder-seq-length"] or 512,
        "target": r["decoder-seq-length"] or 128,
        "vocab": 30522 + int(more.get("vocab-extra-ids", 0)),
    }


_NEEDED = ("hidden-size", "micro-batch-size", "global-batch-size", "num-attention-heads")
_MAKES = {"gpt": _gpt, "moe": _moe, "mixtral": _moe, "bert": _bert, "t5": _t5}


def _plan(r: dict[str, str], more: dict[str, Any]) -> Plan:
    tp, pp, cp = (
        int(r[f"{name}-size"] or 1)
        for name in ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
    )
    chunks, layers = _chunks(r, pp), _uneven(r, more, pp)
    ep = _experts(r, tp)
    # One machine, or as many ranks as the degrees need at least where that is more.
    dp = max(RANKS // (tp * pp * cp), -(-ep // cp), 1)
    return Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        sp=bool(r["sequence-parallel"]) and tp > 1,
        zero=3 if r["use-megatron-fsdp"] else int(bool(r["use-distributed-optimizer"])),
        micro_batch=int(r["micro-batch-size"]),
        global_batch=_batch(r, dp, pp if chunks > 1 else 1),
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        recompute="full" if r["recompute-granularity"] == "full" else "none",
        ep=ep,
        layers=layers,
        framework="megatron-core" if _is_flash(r, more) else "megatron-core-unfused",
    )


def _experts(r: dict[str, str], tp: int) -> int:
    """Ways experts are split beside `tp`: where fewer ranks share one, more share them all."""
    if not r["num-experts"]:
        return 1
    inside = int(r["expert-tensor-parallel-size"] or tp)
    return max(int(r["expert-model-parallel-size"] or 1) * inside // tp, 1)


def _batch(r: dict[str, str], dp: int, turns: int) -> int:
    """Samples of a step, as many as fill the turns of chunks: more are never held at once."""
    micro = int(r["micro-batch-size"])
    each = micro * dp * turns
    return (
        -(-int(r["global-batch-size"] or each) // each) * each
        if turns > 1
        else (int(r["global-batch-size"] or 0) or micro * dp)
    )


def _is_flash(r: dict[str, str], more: dict[str, Any]) -> bool:
    """Whether attention was fused: never in Megatron's own layers; in those of Transformer Engine
    unless told not to, or to be deterministic in the older containers, where that was not fused."""
    if r["transformer-impl"] == "local" or more.get("attention-backend") in ("unfused", "local"):
        return False
    is_fused = more.get("attention-backend") in ("flash", "fused")
    older = r["platform"].startswith("dgxa100_dracooci")
    return is_fused or not (older and r["deterministic-mode"])


def _uneven(r: dict[str, str], more: dict[str, Any], pp: int) -> tuple[int, ...]:
    """Blocks of each stage where the first and the last have their own number."""
    first, last = (more.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    if _ends_count(r, pp):
        each = (int(r["num-layers"]) + 2) // pp
        return (each - 1, *([each] * (pp - 2)), each - 1)
    if first is None or last is None or pp < 3:
        return ()
    each = (int(r["num-layers"]) - int(first) - int(last)) // (pp - 2)
    return (int(first), *([each] * (pp - 2)), int(last))


def _ends_count(r: dict[str, str], pp: int) -> bool:
    """Whether words and loss count as a block each: else the blocks would not divide."""
    parts = pp * int(r["num-virtual-stages-per-pipeline-rank"] or 1)
    blocks = int(r["num-layers"] or 0)
    return parts > 2 and blocks % parts != 0 and (blocks + 2) % parts == 0


def _chunks(r: dict[str, str], pp: int) -> int:
    if not r["num-layers"] or _ends_count(r, pp):
        return 1  # pieces without a block have no counterpart here
    if r["num-virtual-stages-per-pipeline-rank"]:
        return int(r["num-virtual-stages-per-pipeline-rank"])
    each = r["num-layers-per-virtual-pipeline-stage"]
    return int(r["num-layers"]) // pp // int(each) if each else 1
