"""torchtitan: its job configuration (TOML) and its schedule file (CSV).

Field names are those of torchtitan/config/job_config.py (github.com/pytorch/torchtitan, sections
parallelism, activation_checkpoint, training, compile). A schedule file has a row a rank and a cell
an action, `3F0`: torch.distributed.pipelining reads it as `compute_only`; with its sends and
receives (→ `foretell.plan.export.messages`) as `compute_comms`. Stages that are placed one by one
are told by the modules they have.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

from foretell.errors import InputError
from foretell.plan.export.placed import dealt, line, modules, recompute
from foretell.plan.export.say import accumulation, require, whole
from foretell.plan.plan import Names, Plan

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
_DTYPES = {"": "bfloat16", "bf16": "bfloat16", "fp32": "float32"}  # what its FSDP can compute in
_SAID = {"dp", "tp", "pp", "cp", "ep", "sp", "zero", "shard", "micro_batch", "global_batch"}
_SAID |= {
    "schedule",
    "chunks",
    "layers",
    "recompute",
    "dtype",
    "grad_dtype",
    "actions",
    "whatifs",
    "optimizer",
}
_CSV = "schedule.csv"
_COMPUTE = re.compile(r"\d+[FBIW]\d+")


def torchtitan(plan: Plan) -> dict[str, str]:
    """Its configuration, and a schedule file where the plan has actions."""
    parts = dealt(plan) if plan.layers else []
    if plan.stages:
        found = line(plan, "torchtitan")
        parts = modules(found)
        plan = plan.but(
            stages=(), pp=found.size, tp=found.width, chunks=1, actions=found.actions,
            recompute=recompute(found, "torchtitan"),
        )  # fmt: skip
    require(plan, "torchtitan", _SAID)
    if plan.dtype not in _DTYPES:
        raise InputError(f"torchtitan does not compute in {plan.dtype}")
    if plan.zero == 1:
        raise InputError("torchtitan has no zero=1", hint="zero=2 or 3 is its FSDP, 0 its DDP")
    odd = [w for w in plan.whatifs if w != "compile"]
    if odd:
        raise InputError(f"torchtitan has no words for the what-if `{odd[0]}`")
    sections = {
        "parallelism": _parallelism(plan),
        "activation_checkpoint": {"mode": plan.recompute},
        "training": _training(plan),
        "compile": {"enable": "compile" in plan.whatifs},
    }
    if parts:
        sections["parallelism"]["module_fqns_per_model_part"] = parts
    files = {"plan.toml": "\n".join(_section(n, v) for n, v in sections.items())}
    return files | ({_CSV: schedule_csv(plan.actions)} if plan.actions else {})


def schedule_csv(actions: Names) -> str:
    """The schedule file of per-rank actions; chunk c of rank r is stage c·ranks + r."""
    rows = [[_cell(c, rank, len(actions)) for c in row] for rank, row in enumerate(actions)]
    return "".join(",".join(row) + "\n" for row in rows)


def read_schedule(text: str) -> Names:
    """The actions of a schedule file; cells that only communicate are left to the runtime."""
    lines = [line for line in text.splitlines() if line.strip()]
    return tuple(
        tuple(c.strip() for c in line.split(",") if _COMPUTE.fullmatch(c.strip())) for line in lines
    )


def read_torchtitan(text: str, schedule: str = "") -> Plan:
    """The plan in a torchtitan configuration, and in its schedule file where it names one."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"this is no torchtitan configuration: {error}") from None
    axes, training = given.get("parallelism", {}), given.get("training", {})
    copies, shards = (axes.get(f"data_parallel_{k}_degree", 1) for k in ("replicate", "shard"))
    degrees = {field: axes.get(f"{name}_parallel_degree", 1) for name, field in _DEGREES.items()}
    found: dict[str, Any] = {k: whole(n, f"the degree `{k}`") for k, n in degrees.items()}
    found["dp"] = whole(copies, "copies") * whole(shards, "shards")
    if shards > 1:
        found["zero"] = 2 if axes.get("fsdp_reshard_after_forward") == "never" else 3
        found["shard"] = shards if copies > 1 else 0
    found["recompute"] = given.get("activation_checkpoint", {}).get("mode", "none")
    found["dtype"] = _READ.get(training.get("mixed_precision_param", "bfloat16"), "")
    found["whatifs"] = ("compile",) if given.get("compile", {}).get("enable") else ()
    found["global_batch"] = whole(training.get("global_batch_size", 0), "`global_batch_size`")
    local = training.get("local_batch_size", 0)
    found["micro_batch"] = axes.get("pipeline_parallel_microbatch_size", local)
    return Plan(**found | _read_order(axes, schedule))


_DEGREES = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep"}
_READ = {"bfloat16": "bf16", "float32": "fp32"}


def _read_order(axes: dict[str, Any], schedule: str) -> dict[str, Any]:
    """Schedule and actions; a file that is named has to be given."""
    if "pipeline_parallel_schedule_csv" in axes:
        if not schedule:
            name = axes["pipeline_parallel_schedule_csv"]
            raise InputError(
                f"the configuration has its schedule in `{name}`", hint="give that file's text too"
            )
        return {"actions": read_schedule(schedule), "schedule": "actions"}
    words = {theirs.lower(): ours for ours, theirs in _SCHEDULES.items()}
    name = str(axes.get("pipeline_parallel_schedule", "1F1B"))
    if name.lower() not in words:
        raise InputError(f"torchtitan's schedule `{name}` has no name in a plan")
    return {"schedule": words[name.lower()]}


def _cell(cell: str, rank: int, ranks: int) -> str:
    if cell[:1].isdigit():
        return cell
    action, _, chunk = cell.partition(".")
    return f"{int(chunk or 0) * ranks + rank}{action}"


def _parallelism(plan: Plan) -> dict[str, Any]:
    shards = plan.sharing if plan.zero >= 2 else 1
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.dp // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "never" if plan.zero == 2 else "default",
        "tensor_parallel_degree": plan.tp,
        "pipeline_parallel_degree": plan.pp,
        "context_parallel_degree": plan.cp,
        "expert_parallel_degree": plan.ep,
    }
    if plan.pp > 1:
        found["pipeline_parallel_schedule"] = _schedule(plan)
        found["pipeline_parallel_microbatch_size"] = plan.micro_batch or 1
    if plan.actions:
        found["pipeline_parallel_schedule_csv"] = _CSV
    return found


def _schedule(plan: Plan) -> str:
    if plan.actions:
        return "_PipelineScheduleRuntime"
    if plan.schedule not in _SCHEDULES:
        raise InputError(f"torchtitan has no schedule `{plan.schedule}`")
    return _SCHEDULES["interleaved" if plan.chunks > 1 else plan.schedule]


def _training(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {"mixed_precision_param": _DTYPES[plan.dtype]}
    if plan.micro_batch:
        # its pipeline cuts the local batch itself; elsewhere it adds gradients up
        times = accumulation(plan) if plan.pp > 1 else 1
        found["local_batch_size"] = plan.micro_batch * times
    if plan.global_batch:
        found["global_batch_size"] = plan.global_batch
    return found


def _section(name: str, values: dict[str, Any]) -> str:
    """JSON's numbers, texts and booleans are TOML's too."""
    return f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
