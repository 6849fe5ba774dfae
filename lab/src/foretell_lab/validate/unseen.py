"""Predictions for sources that no constant was fitted to, by default options: one line a source.

    steps        whole language-model steps on one H200 (benchmarks/measured/llm_steps_h200.json):
                 the power model saw its GEMM rows, operator counts were checked against its steps
    vtrain-multi GPT on 64 to 512 A100: the profile saw single-node rows of the same authors
    bigscience   GPT on 8 V100: neither this device nor this table was fitted to
    torchtitan   Llama under FSDP, tensor, pipeline and context parallelism on A100, H100 and H200
    published    tables of NVIDIA, Databricks and Kempner: Megatron-core and FSDP on H100 to GB300,
                 dense and MoE, one source for each (tables/published_runs.csv and .toml)
    projects     runs that six projects report of themselves, on A100: nothing was looked at before
    reported     525 runs of 27 further reports, V100 to MI350X, mixed boards, LoRA
                 (tables/reported_runs.csv and .toml)
    images       networks of images and encoders on one H200, from their family's spec alone
                 (benchmarks/measured/training_parts_h200.json); host time is from other steps

Each line has the median error, the bias, the 90th percentile and the share inside the 80 %
interval; memory where the source has it.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np

from foretell.cluster import load as load_cluster
from foretell.errors import ForetellError
from foretell.plan import Plan
from foretell.predict import Prediction, predict
from foretell.report.words import table as text_table
from foretell.workload import load
from foretell_lab.validate import reported
from foretell_lab.validate.layouts import bigscience, table

PARTS = Path("benchmarks/measured/training_parts_h200.json")
STEPS = Path("benchmarks/measured/llm_steps_h200.json")  # from the project's root


@dataclass(frozen=True)
class Row:
    """One measured row and what was predicted for it."""

    source: str
    name: str
    seconds: float
    found: Prediction
    peak: float = 0.0  # bytes measured; 0 where that was not done

    @property
    def error(self) -> float:
        """Relative error of the predicted time."""
        return self.found.step / self.seconds - 1

    @property
    def covered(self) -> bool:
        """Whether the measurement lies inside the 80 % interval."""
        return self.found.low <= self.seconds <= self.found.high


_OPTIMIZERS = {
    "adamw": "optimizer=adam",
    "adamw-fused": "optimizer=adam,optimizer_kernels=fused",
    "sgd": "optimizer=momentum",
}


def steps(truth: Path) -> Iterator[Row]:
    """Whole steps on one H200."""
    if not STEPS.exists():
        return
    for r in json.loads(STEPS.read_text())["rows"]:
        if r["part"] != "step":
            continue
        text = f"dp=1,micro_batch={r['batch']},global_batch={r['batch']},precision={r['precision']}"
        text += f",{_OPTIMIZERS[r['optimizer']]}" + (",compile=yes" if r["compiled"] else "")
        name = f"{r['model']} {r['precision']}{' compiled' if r['compiled'] else ''} {r['batch']}"
        found = _predicted(_spec(r), "h200", text)
        yield Row("steps", name, r["seconds"], found, r["peak_bytes"])


def _spec(r: dict[str, Any]) -> str:
    """The family spec of one measured model."""
    shape = ",".join(f"{k}={r[k]}" for k in ("layers", "hidden", "heads", "seq", "vocab"))
    if "gpt" in r["kind"]:
        drops = "dropout=yes,tanh=yes" if r["kind"].startswith("hf") else "dropout=no"
        return f"gpt:{shape},{drops}"
    norm = "rms" if r.get("native") else "rms-composite"
    return f"llama:{shape},groups={r['groups']},inner={r['inner']},norm={norm}"


_BERT = {"bert-base": (12, 768, 12, 30522), "bert-large": (24, 1024, 16, 30522)}
_BERT |= {"roberta-large": (24, 1024, 16, 50265)}  # layers, hidden, heads, vocabulary
_ADAM = ("bert", "vit", "swin")  # what was measured with AdamW; the others with momentum


def images(truth: Path) -> Iterator[Row]:
    """Networks of images and encoders on one H200."""
    if not PARTS.exists():
        return
    for r in json.loads(PARTS.read_text())["rows"]:
        if r["part"] != "step" or "seconds" not in r:
            continue
        precision, _, layout = r["way"].partition(" ")
        precision = "fp32-ieee" if precision == "fp32" else precision  # measured without tf32
        text = f"dp=1,micro_batch={r['batch']},global_batch={r['batch']},precision={precision}"
        text += f",framework={'ddp-amp' if layout else 'ddp'}"
        text += ",optimizer=adam" if any(word in r["model"] for word in _ADAM) else ""
        model = r["model"]
        if r["seq"]:
            names = zip(("layers", "hidden", "heads", "vocab"), _BERT[model], strict=True)
            shape = ",".join(f"{name}={size}" for name, size in names)
            model = f"bert:head=mlm,{shape},seq={r['seq']}"
        found = _predicted(model, "h200", text)
        name = f"{r['model']} {r['batch']} {r['way']}"
        yield Row("images", name, r["seconds"], found, r["peak_bytes"])


def vtrain_multi(truth: Path) -> Iterator[Row]:
    """GPT on 64 to 512 A100."""
    for r in table(truth / "tables" / "vtrain_multi_node.csv"):
        shape = f"layers={r['# layers']},hidden={r['hidden size']},heads={r['attention heads']}"
        degrees = (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline"))
        text = ",".join(f"{k}={r[f'{word} parallelism']}" for k, word in degrees)
        text += f",micro_batch={r['micro batch']},global_batch={r['global batch']},recompute=full"
        model = f"gpt:{shape},seq={r['sequence length']},vocab=51200"
        found = _predicted(model, f"dgx-a100:nodes={int(r['# GPUs']) // 8}", text)
        yield Row("vtrain-multi", f"{shape} {text}", float(r["iteration time (ms)"]) / 1e3, found)


def volta(truth: Path) -> Iterator[Row]:
    """GPT on 8 V100."""
    for request in bigscience(truth):
        plan = str(request.plan.but(framework=""))
        found = _predicted(request.workload, request.on, plan)
        yield Row("bigscience", plan, request.measured, found)


_IN_2025 = re.compile("2025-?06")  # its loss is compiled since May 2025
# Boards of the table by their words; the rest is the table's own H100 of 500 W.
_LLAMA_2 = {  # Touvron et al. 2023, table 1 and section 2.2
    "Llama-2-13B": "llama:layers=40,hidden=5120,heads=40,inner=13824",
    "Llama-2-70B": "llama:layers=80,hidden=8192,heads=64,groups=8,inner=28672",
}
_BOARDS = {"A100 80GB": "a100-80", "H200": "h200"}


def torchtitan(truth: Path) -> Iterator[Row]:
    """Llama as torchtitan ran it.

    A pipeline's batch is cut into as many micro-batches as it has ranks, and rows that say nothing
    of recompute have `selective`: both are torchtitan's defaults (its `llama3_8b.toml` of 2025-06).
    Its memory is what the allocator has reserved.
    """
    rows = table(truth / "tables" / "torchtitan.csv")
    reserved = {_run(r): float(r["value"]) for r in rows if r["metric"] == "peak_memory"}
    for r in rows:
        if r["metric"] != "throughput_per_gpu":
            continue
        words, gpus = r["parallel"], int(r["n_gpus"])
        tp, pp, cp = (_degree(words, name) for name in ("TP", "PP", "CP"))
        dp, batch = gpus // (tp * pp * cp), int(r["batch_per_gpu"])
        framework = "torchtitan" if _IN_2025.search(r["src_file"]) else "fsdp"
        text = f"dp={dp},tp={tp},pp={pp},cp={cp},framework={framework},global_batch={batch * dp}"
        text += f",micro_batch={batch // pp},recompute={_recompute(words)}"
        text += ",schedule=interleaved,chunks=2" if "Interleaved" in words else ""
        text += f",zero={3 if dp * cp > 1 else 0},precision={_precision(r['precision'])}"
        text += ",sp=yes" if tp > 1 else ""
        text += ",tp_overlap=yes" if re.search(r"[Aa]sync ?TP", words) else ""
        text += ",compile=yes" if "compile" in words or "loat8" in r["precision"] else ""
        model = _LLAMA_2.get(r["model"], r["model"].lower().replace("llama-3-", "llama-3.1-"))
        on = f"{_BOARDS.get(r['gpu'], 'h100-500w')}:gpus={gpus}"
        seconds = batch * dp * int(r["seq_or_img"]) / float(r["value"]) / gpus
        seq = ("," if ":" in model else ":") + f"seq={r['seq_or_img']}"
        found = _predicted(model + seq, on, text)
        peak = reserved.get(_run(r), 0.0) * 2**30 / reported.RESERVED
        yield Row("torchtitan", f"{r['model']} {words}", seconds, found, peak)


def _run(r: dict[str, str]) -> tuple[str, ...]:
    """What tells one run of a table from another, whatever was measured of it."""
    names = ("model", "gpu", "n_gpus", "batch_per_gpu", "seq_or_img", "precision", "parallel")
    return tuple(r[name] for name in names)


TABLES = files("foretell_lab.validate").joinpath("tables")
_FORMATS = {"bf16": "bf16-master", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "nvfp4"}


def _runs(
    source: str, keep: Callable[[dict[str, str]], bool] = lambda r: True, *, named: bool = True
) -> Iterator[Row]:
    """Runs of one maker's tables, as a user would write them; sharded optimizer everywhere.

    Unless `named`, the framework that ran them is left to the default.
    """
    with as_file(TABLES.joinpath("published_runs.csv")) as path:
        rows = table(path)
    for r in rows:
        if r["source"] != source or not keep(r):
            continue
        model, on, plan = request(r, named=named)
        batch, seq, gpus = int(r["global_batch"]), int(r["seq"]), int(r["gpus"])
        seconds = batch * seq / float(r["tokens_per_second"]) / gpus
        peak = re.search(r"peak=(\d+) MiB", r["note"])
        yield Row(
            source,
            f"{r['release']} {model} {on} {plan}",
            seconds,
            _predicted(model, on, plan),
            float(peak.group(1)) * 2**20 if peak else 0.0,
        )


@cache
def makers() -> dict[str, dict[str, str]]:
    """Where each maker's tables stand and the framework that ran them."""
    return tomllib.loads(TABLES.joinpath("published_runs.toml").read_text("utf-8"))


def request(r: dict[str, str], *, named: bool = True) -> tuple[str, str, str]:
    """One row of such a table as workload, cluster and plan."""
    degrees = {k: int(r[k]) for k in ("tp", "pp", "cp", "ep")}
    dp = int(r["gpus"]) // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    text = f"dp={dp}," + ",".join(f"{k}={v}" for k, v in degrees.items() if v > 1)
    text += f",micro_batch={r['micro_batch']},global_batch={r['global_batch']}"
    precision = _FORMATS.get(r["precision"], r["precision"])
    text += ",dtype=fp16" if precision == "fp16" else f",precision={precision}"
    text += ",sp=yes" if degrees["tp"] > 1 else ""
    text += ",etp=1" if degrees["tp"] > 1 and degrees["ep"] > 1 else ""
    text += f",schedule=interleaved,chunks={r['vp']}" if int(r["vp"]) > 1 else ""
    text += ",recompute=full" if "recompute" in r["note"] else ""
    text += ",compile=yes" if "compile" in r["note"] else ""
    text += ",ep_overlap=yes" if "a2a overlap" in r["note"] else ""
    text += ",ep_dispatch=rank" if "alltoall" in r["note"] else ""
    graphs = {"full graph": "iteration", "layer graphs": "layers"}
    text += "".join(f",cuda_graph={how}" for said, how in graphs.items() if said in r["note"])
    framework = makers()[r["source"]]["framework"]
    text += f",framework={framework}" if named and framework else ""
    text += f",zero={_zero(r, dp)}"
    text += "".join(
        "," + said for said in re.findall(r"shard=\d+|optimizer_kernels=\w+", r["note"])
    )
    text += ",grad_dtype=fp32" if named and framework == "llm-foundry" else ""
    seq = ("," if ":" in r["model"] else ":") + f"seq={r['seq']}"
    seq += ",capacity=1" if "tokendrop" in r["note"] else ""
    on = f"{r['system']}{',' if ':' in r['system'] else ':'}gpus={r['gpus']}"
    return r["model"] + seq, on, text.replace(",,", ",")


def _zero(r: dict[str, str], dp: int) -> int:
    """Parameters sharded where the table says FSDP, the optimizer's state where it says nothing."""
    if "DDP" in r["note"] or dp == 1:
        return 0
    return 3 if r["fsdp"] == "1" else 1


_DENSE = ("llama", "gpt:", "nemotron")


def bridge_dense(truth: Path) -> Iterator[Row]:
    """Llama under Megatron-core on H100 to GB300 in fp8 and nvfp4 (Megatron-Bridge)."""
    return _runs("megatron-bridge", lambda r: r["model"].startswith(_DENSE))


def bridge_experts(truth: Path) -> Iterator[Row]:
    """Mixtures of experts under Megatron-core on H100 to GB300 (Megatron-Bridge)."""
    return _runs("megatron-bridge", lambda r: not r["model"].startswith(_DENSE))


def nemo(truth: Path) -> Iterator[Row]:
    """GPT, Llama and Nemotron under Megatron-core on H100 in fp8 (NeMo 24.07 and 24.12)."""
    return _runs("nemo")


def dgxc(truth: Path) -> Iterator[Row]:
    """Llama, Nemotron and GPT under Megatron-core on 8 to 2304 H100, bf16 and fp8 (NVIDIA DGXC)."""
    return _runs("dgxc")


def kempner(truth: Path) -> Iterator[Row]:
    """Llama under FSDP2 and tensor parallelism on 1 to 32 H200, compiled (KempnerForge)."""
    return _runs("kempnerforge")


def automodel(truth: Path) -> Iterator[Row]:
    """Mixtures of experts under FSDP2 on H100 in bf16 (NeMo AutoModel)."""
    return _runs("automodel")


def foundry(truth: Path) -> Iterator[Row]:
    """MPT under FSDP on 8 to 64 H100 in bf16 and fp8 (llm-foundry)."""
    return _runs("llm-foundry")


def foundry_by_default(truth: Path) -> Iterator[Row]:
    """The same runs of MPT asked without their framework, whose attention took twice as long."""
    return _runs("llm-foundry", named=False)


PROJECTS = ("fms-fsdp", "dlrover-fsdp", "dlrover-3d", "tinyllama", "nanogpt", "llms-from-scratch")


def projects(truth: Path) -> Iterator[Row]:
    """Runs that projects report of themselves: 1 to 128 A100 under DDP, FSDP and DeepSpeed."""
    return itertools.chain.from_iterable(_runs(name) for name in PROJECTS)


def _reported(source: str, about: str) -> Callable[[Path], Iterator[Row]]:
    """One source of runs that were reported in public."""

    def rows(truth: Path) -> Iterator[Row]:
        for r in reported.runs(source):
            found = predict(Plan.parse(r.plan), load(r.model), reported.cluster(r.system))
            yield Row(source, f"{r.model} {r.system} {r.plan}", r.seconds, found, r.peak)

    rows.__doc__ = f"{about}."
    return rows


def _degree(words: str, name: str) -> int:
    found = re.search(rf"{name} (\d+)", words)
    return int(found.group(1)) if found else 1


def _recompute(words: str) -> str:
    if re.search(r"full AC|AC full", words):
        return "full"
    return "none" if "AC no" in words else "selective"


def _precision(words: str) -> str:
    return "fp8" if "float8" in words else "bf16-master"


def _predicted(model: str, on: str, plan: str) -> Prediction:
    return predict(Plan.parse(plan), load(model), _cluster(on))


@cache
def _cluster(on: str) -> Any:
    return load_cluster(on)


SOURCES: dict[str, Callable[[Path], Iterator[Row]]] = {
    "steps": steps,
    "vtrain-multi": vtrain_multi,
    "bigscience": volta,
    "torchtitan": torchtitan,
    "bridge-dense": bridge_dense,
    "bridge-experts": bridge_experts,
    "nemo": nemo,
    "dgxc": dgxc,
    "kempner": kempner,
    "automodel": automodel,
    "foundry-h100": foundry,
    "foundry-by-default": foundry_by_default,
    "projects": projects,
    "images": images,
}
SOURCES |= {name: _reported(name, said["about"]) for name, said in reported.sources().items()}


def answered(truth: Path) -> dict[str, list[Row]]:
    """Every source that can be asked, as today's numbers answer it."""
    found = {}
    for name, source in SOURCES.items():
        with suppress(ForetellError):
            found[name] = list(source(truth))
    return {name: rows for name, rows in found.items() if rows}


def report(truth: Path) -> dict[str, Any]:
    """Errors of every source with numbers fitted without it, as values and as a table."""
    from foretell_lab.validate.intervals import answered_left_out

    rows = answered_left_out(answered(truth))
    values = {name: _summary(some) | reported.first(name) for name, some in rows.items()}
    every = np.array([abs(row.error) for some in rows.values() for row in some])
    whole = {"rows": len(every), "median": float(np.median(every))}
    whole["p90"] = float(np.quantile(every, 0.9))
    return {"sources": values, "all": whole, "text": _text(values, whole)}


def _summary(rows: list[Row]) -> dict[str, Any]:
    errors = np.array([row.error for row in rows])
    peaks = np.array([row.found.peak / row.peak - 1 for row in rows if row.peak])
    worst = sorted(rows, key=lambda row: -abs(row.error))[:5]
    found = {
        "rows": len(rows),
        "median": float(np.median(np.abs(errors))),
        "bias": float(np.median(errors)),
        "p90": float(np.quantile(np.abs(errors), 0.9)),
        "inside": float(np.mean([row.covered for row in rows])),
        "worst": [(row.name, row.error) for row in worst],
    }
    return found | ({"memory": float(np.median(np.abs(peaks)))} if len(peaks) else {})


def _text(values: dict[str, Any], whole: dict[str, float]) -> str:
    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f} %"

    keys = ("median", "bias", "p90", "inside", "memory")
    rows = [
        (name, str(v["rows"]), percent(v.get("first", {}).get("median")),
         *(percent(v.get(key)) for key in keys))
        for name, v in values.items()
    ]  # fmt: skip
    heads = ("source", "rows>", "blind>", "median>", "bias>", "p90>", "inside>", "memory>")
    lines = [text_table(heads, rows)]
    median, p90 = percent(whole["median"]), percent(whole["p90"])
    lines.append(f"over all {whole['rows']} rows: median {median}, 90 % below {p90}")
    for name, v in values.items():
        lines += [f"{name}, furthest off: {what} {percent(off)}" for what, off in v["worst"]]
    return "\n".join(lines)
