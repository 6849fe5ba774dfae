"""torchtitan: a function over its Python configuration, and its schedule file (CSV).

Field names are those of torchtitan/config/configs.py and trainer.py (github.com/pytorch/torchtitan,
0.3.0 and commit b5bcd76 of 2026-08-21): a configuration is made by a function of a model's
`config_registry`. 0.3 counts batches in samples, later ones in tokens: what is written finds out. A
schedule file has a row a rank and a cell an action, `3F0`:
torch.distributed.pipelining reads it as `compute_only`; with its sends and receives
(→ `foretell.plan.export.messages`) as `compute_comms`. Stages that are placed one by one are given
by the modules they have.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from foretell.errors import InputError
from foretell.plan.export.placed import line, modules, recompute, stage_modules
from foretell.plan.export.say import accumulation, number_format, require, whole
from foretell.plan.plan import Names, Plan

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
_SCHEDULES |= {"zb-v": "ZBVZeroBubble", "dualpipev": "DualPipeV"}
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # what its FSDP can compute in
_SAID = {"dp", "tp", "pp", "cp", "ep", "sp", "zero", "shard", "micro_batch", "global_batch"}
_SAID |= {"schedule", "chunks", "layers", "recompute", "dtype", "actions", "whatifs", "offload"}
_SAID |= {"precision", "compile", "optimizer"}
_CSV = "schedule.csv"
_PY = "torchtitan_plan.py"
_COMPUTE = re.compile(r"\d+[FBIW]\d+")
_AC = {"full": "FullAC", "selective": "SelectiveAC"}
_TOKENS = "training.max_context_length"


def torchtitan(plan: Plan) -> dict[str, str]:
    """A module that sets a configuration, and a schedule file where the plan has actions."""
    parts = stage_modules(plan) if plan.layers else []
    if plan.stages:
        found = line(plan, "torchtitan")
        parts = modules(found)
        plan = plan.but(
            stages=(), pp=found.size, tp=found.width, chunks=1, actions=found.actions,
            recompute=recompute(found, "torchtitan"),
        )  # fmt: skip
    _check(plan, parts)
    rows = {f"parallelism.{key}": repr(value) for key, value in _parallelism(plan, parts).items()}
    rows |= {"training.mixed_precision_param": repr(_format(plan))}
    rows |= {"training.enable_cpu_offload": repr(plan.offload)}
    if plan.pp > 1:
        rows["training.disable_cuda_graphs"] = "True"  # it refuses them beside a pipeline
    again = f"{_AC[plan.recompute]}.Config()" if plan.recompute in _AC else "None"
    rows |= {"config.activation_checkpoint": again}
    rows |= {"config.compile.enable": repr(plan.compile or "compile" in plan.whatifs)}
    return {_PY: _module(plan, rows)} | ({_CSV: schedule_csv(plan.actions)} if plan.actions else {})


def _check(plan: Plan, parts: list[Any]) -> None:
    """Raise where torchtitan has no word for something."""
    require(plan, "torchtitan", _SAID)
    if plan.optimizer not in ("", "adam"):
        raise InputError(f"torchtitan trains with AdamW, not {plan.optimizer}")
    if plan.zero == 1:
        raise InputError("torchtitan has no zero=1", hint="zero=2 or 3 is its FSDP, 0 its DDP")
    if plan.offload and plan.zero < 2:
        raise InputError("torchtitan offloads under FSDP alone", hint="zero=2 or 3 is its FSDP")
    if plan.chunks > 2 and not parts:
        raise InputError(
            f"torchtitan has two chunks a rank, not {plan.chunks}, unless it is given their layers",
            hint="give the plan `layers`",
        )
    odd = [w for w in plan.whatifs if w != "compile"]
    if odd:
        raise InputError(f"torchtitan has no words for the what-if `{odd[0]}`")


def _module(plan: Plan, rows: dict[str, str]) -> str:
    text = "".join(c for c in str(plan)[:60] if c not in '"\\\n')
    kind = _AC.get(plan.recompute)
    named = [f"from torchtitan.distributed.activation_checkpoint import {kind}", "", ""]
    lines = [
        f'"""{text}, for a configuration of torchtitan\'s.',
        "",
        "In the config_registry of your model:  return with_plan(llama3_8b())",
        '"""',
        "",
        *(named if kind else [""]),
        "def with_plan(config):",
        "    parallelism, training = config.parallelism, config.training",
        *(f"    {name} = {value}" for name, value in rows.items()),
        *_batch(plan),
        "    return config",
    ]
    return "\n".join(lines) + "\n"


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
    """The plan in such a module, and in its schedule file where it names one; nothing is run."""
    axes, training, config = _assigned(text)
    copies, shards = (axes.get(f"data_parallel_{k}_degree", 1) for k in ("replicate", "shard"))
    degrees = {field: axes.get(f"{name}_parallel_degree", 1) for name, field in _DEGREES.items()}
    found: dict[str, Any] = {k: whole(n, f"the degree `{k}`") for k, n in degrees.items()}
    found["dp"] = whole(copies, "copies") * whole(shards, "shards")
    found["sp"] = bool(axes.get("enable_sequence_parallel", True)) and found["tp"] > 1
    if shards > 1:
        found["zero"] = 2 if axes.get("fsdp_reshard_after_forward") == "never" else 3
        found["shard"] = shards if copies > 1 else 0
    found["recompute"] = {v: k for k, v in _AC.items()}.get(config["activation_checkpoint"], "none")
    found["dtype"] = _READ.get(training.get("mixed_precision_param", "bfloat16"), "")
    found["offload"] = bool(training.get("enable_cpu_offload", False))
    found["whatifs"] = ("compile",) if config["compile"] else ()
    whole_batch = training.get("num_tokens_per_train_step", training.get("global_batch_size", 0))
    found["global_batch"] = max(whole(whole_batch, "the batch"), 0)  # -1: it does not say
    part = axes if found["pp"] > 1 else training
    own = "pipeline_parallel_microbatch_size" if found["pp"] > 1 else "local_batch_size"
    micro = training.get("num_tokens_per_microbatch_per_dp_rank", part.get(own, 0))
    found["micro_batch"] = whole(micro, "the micro-batch")
    return Plan(**found | _read_order(axes, schedule))


_DEGREES = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep"}
_READ = {"bfloat16": "bf16", "float32": "fp32"}


def _assigned(text: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What a module assigns to the fields of `parallelism` and `training`, and of the rest."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise InputError(f"this is no torchtitan configuration: {error}") from None
    axes: dict[str, Any] = {}
    training: dict[str, Any] = {}
    config: dict[str, Any] = {"activation_checkpoint": "", "compile": False}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        *owner, field = ast.unparse(node.targets[0]).split(".")
        if owner[-1:] == ["parallelism"]:
            axes[field] = _literal(node.value, field)
        elif owner[-1:] == ["training"]:
            training[field] = _literal(node.value, field)
        elif owner[-1:] == ["compile"] and field == "enable":
            config["compile"] = _literal(node.value, field)
        elif field == "activation_checkpoint":
            config[field] = ast.unparse(node.value).partition(".")[0]
    return axes, training, config


def _literal(value: ast.expr, field: str) -> Any:
    """A plain value; of a number of tokens, how many sequences."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        value = value.left
    try:
        return ast.literal_eval(value)
    except ValueError:
        raise InputError(f"`{field}` of this configuration is no plain value") from None


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


def _parallelism(plan: Plan, parts: list[Any]) -> dict[str, Any]:
    shards = plan.sharing if plan.zero >= 2 else 1
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.dp // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "never" if plan.zero == 2 else "default",
        "tensor_parallel_degree": plan.tp,
        "enable_sequence_parallel": plan.sp,
        "pipeline_parallel_degree": plan.pp,
        "context_parallel_degree": plan.cp,
        "expert_parallel_degree": plan.ep,
    }
    if plan.pp > 1:
        found["pipeline_parallel_schedule"] = _schedule(plan)
    if plan.actions:
        found["pipeline_parallel_schedule_csv"] = _CSV
    if parts:
        found["module_fqns_per_model_part"] = parts
    return found


def _micro_batches(plan: Plan) -> int:
    """Micro-batches of a pipeline, where the plan says how many; else the configuration's."""
    cells = [cell for row in plan.actions for cell in row]
    if cells:
        numbers = [re.split(r"[FBIW]", cell.partition(".")[0])[-1] for cell in cells]
        return 1 + max(int(number) for number in numbers)
    return accumulation(plan) if plan.micro_batch and plan.global_batch else 0


def _schedule(plan: Plan) -> str:
    if plan.actions:
        return "_PipelineScheduleRuntime"
    if plan.schedule not in _SCHEDULES:
        raise InputError(f"torchtitan has no schedule `{plan.schedule}`")
    is_loop = plan.chunks > 1 and plan.schedule == "1f1b"
    return _SCHEDULES["interleaved" if is_loop else plan.schedule]


def _format(plan: Plan) -> str:
    """What its FSDP computes in; bfloat16 by itself."""
    says = plan.dtype or plan.precision
    return number_format(plan, "torchtitan", _DTYPES) if says else "bfloat16"


def _batch(plan: Plan) -> list[str]:
    """Lines that set the batch: 0.3 has its fields in samples, later ones in tokens."""
    both = _samples(plan), _tokens(plan)
    if not all(both):
        return []
    samples, tokens = ([f"        {k} = {v}" for k, v in rows.items()] for rows in both)
    return ['    if hasattr(training, "local_batch_size"):', *samples, "    else:", *tokens]


def _samples(plan: Plan) -> dict[str, int]:
    """Samples of a rank before an update, or of a pipeline between two."""
    found: dict[str, int] = {}
    here = plan.global_batch // plan.dp
    many = _micro_batches(plan) if plan.pp > 1 else 0
    if plan.pp > 1 and (plan.micro_batch or many):
        each = plan.micro_batch or here // many or 1
        found["parallelism.pipeline_parallel_microbatch_size"] = each
        here = here or many * each
    elif plan.micro_batch:
        here = plan.micro_batch
    found |= {"training.local_batch_size": here} if here else {}
    return found | ({"training.global_batch_size": plan.global_batch} if plan.global_batch else {})


def _tokens(plan: Plan) -> dict[str, str]:
    """The same in tokens: samples times the length of a sequence."""
    found: dict[str, str] = {}
    if plan.pp > 1 and (many := _micro_batches(plan)):
        found["parallelism.num_pp_microbatches"] = repr(many)
    alone = 0 if plan.pp > 1 else plan.global_batch // plan.dp
    if each := plan.micro_batch or alone:
        found["training.num_tokens_per_microbatch_per_dp_rank"] = f"{each} * {_TOKENS}"
    if plan.global_batch:
        found["training.num_tokens_per_train_step"] = f"{plan.global_batch} * {_TOKENS}"
    return found
