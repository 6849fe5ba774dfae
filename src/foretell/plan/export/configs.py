"""Accelerate's YAML, Lightning's strategy and Nanotron's YAML.

Names are those of accelerate 1.15 (commands/config/config_args.py, commands/launch.py), of
lightning 2.6 (pytorch.strategies: DDPStrategy, ModelParallelStrategy; pytorch.Trainer) and of
nanotron 0.4's ParallelismArgs, TokensArgs and OptimizerArgs (github.com/huggingface/nanotron,
src/nanotron/config): text only, none of them is needed.
"""

from __future__ import annotations

from typing import Any

from foretell.errors import InputError
from foretell.plan.export.say import accumulation, batch_of_rank, number_format, require
from foretell.plan.plan import Plan

_BATCH = {"dp", "micro_batch", "global_batch", "dtype", "precision"}


def accelerate(plan: Plan) -> dict[str, str]:
    """A file for `accelerate launch --config_file`; batch sizes are the script's."""
    said = _BATCH | {"zero", "shard", "tp", "cp", "offload", "recompute", "compile", "optimizer"}
    require(plan, "Accelerate", said)
    if plan.zero == 1:
        raise InputError("Accelerate has no zero=1", hint="zero=2 or 3 is its FSDP, 0 its DDP")
    if plan.recompute == "selective":
        raise InputError("Accelerate recomputes whole blocks: it has no recompute=selective")
    kind = "FSDP" if plan.zero else ("MULTI_GPU" if plan.ranks > 1 else "NO")
    if kind != "FSDP" and (plan.tp > 1 or plan.cp > 1 or plan.recompute != "none" or plan.offload):
        raise InputError(
            "Accelerate splits tensors and tokens, recomputes and offloads under FSDP alone",
            hint="zero=2 or 3 is its FSDP",
        )
    word = number_format(plan, "Accelerate", {"fp32": "no", "bf16": "bf16", "fp16": "fp16"})
    rows: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "num_processes": plan.ranks,
        "num_machines": 1,
        "machine_rank": 0,
        "mixed_precision": word,
        "use_cpu": False,
    }
    if kind == "FSDP":
        rows["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": plan.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": plan.offload,
            "fsdp_activation_checkpointing": plan.recompute == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
        }
        rows["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": plan.dp // plan.sharing,
            "parallelism_config_dp_shard_size": plan.sharing,
            "parallelism_config_tp_size": plan.tp,
            "parallelism_config_cp_size": plan.cp,
        }
    if plan.compile:
        rows["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    steps = accumulation(plan)
    head = f"# in the script: Accelerator(gradient_accumulation_steps={steps})"
    if samples := batch_of_rank(plan):
        head += f", batches of {samples} samples a rank"
    head += f"\n# optimizer: {plan.optimizer}" if plan.optimizer else ""
    return {"accelerate.yaml": f"{head}\n{_yaml(rows)}"}


def lightning(plan: Plan) -> dict[str, str]:
    """A Trainer with its strategy; sharding is done in the module's `configure_model`."""
    said = _BATCH | {"zero", "shard", "tp", "bucket_mb", "optimizer"}
    require(plan, "Lightning", said)
    if plan.zero in (1, 2):
        raise InputError(f"Lightning has no zero={plan.zero}", hint="zero=3 is its FSDP, 0 its DDP")
    if plan.tp > 1 and not plan.zero and plan.dp > 1:
        raise InputError("Lightning splits tensors beside FSDP alone", hint="take zero=3, or dp=1")
    words = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
    word = number_format(plan, "Lightning", words)
    is_split = plan.zero == 3 or plan.tp > 1
    name = "ModelParallelStrategy" if is_split else "DDPStrategy"
    given = f"bucket_cap_mb={plan.bucket_mb:g}"
    if is_split:
        if plan.sharing != plan.dp:
            raise InputError("Lightning's ModelParallelStrategy has no copies of shards (`shard`)")
        given = f"data_parallel_size={plan.dp}, tensor_parallel_size={plan.tp}"
    lines = [
        "from lightning.pytorch import Trainer",
        f"from lightning.pytorch.strategies import {name}",
        "",
        "trainer = Trainer(",
        f"    devices={plan.ranks},  # of one node; num_nodes=… for more",
        f"    strategy={name}({given}),",
        f'    precision="{word}",',
        f"    accumulate_grad_batches={accumulation(plan)},",
        ")",
    ]
    if is_split:
        lines += [
            "",
            "# in your LightningModule:",
            "# def configure_model(self):",
            '#     mesh = self.device_mesh["data_parallel"]',
            "#     for block in self.model.layers:",
            "#         fully_shard(block, mesh=mesh)",
            "#     fully_shard(self.model, mesh=mesh)",
        ]
    samples = batch_of_rank(plan)
    lines += [f"# batches of {samples} samples a rank"] if samples else []
    lines += [f"# optimizer: {plan.optimizer}"] if plan.optimizer else []
    return {"lightning_plan.py": "\n".join(lines) + "\n"}


def nanotron(plan: Plan) -> dict[str, str]:
    """The sections of a Nanotron configuration that a plan decides."""
    said = _BATCH | {"tp", "pp", "ep", "cp", "sp", "zero", "schedule", "recompute", "optimizer"}
    require(plan, "Nanotron", said)
    if plan.zero > 1:
        raise InputError(f"Nanotron shards optimizer state: zero=0 or 1, not {plan.zero}")
    if plan.recompute == "selective":
        raise InputError("Nanotron recomputes whole layers: it has no recompute=selective")
    engines = {"1f1b": "1f1b", "gpipe": "afab"}
    if plan.schedule not in engines:
        raise InputError(f"Nanotron runs 1f1b or gpipe (afab), not {plan.schedule}")
    if plan.optimizer not in ("", "adam"):
        raise InputError(f"Nanotron trains with adamW, not {plan.optimizer}")
    word = number_format(plan, "Nanotron", {"fp32": "float32", "bf16": "bfloat16"})
    newer = {"context_parallel_size": plan.cp} if plan.cp > 1 else {}  # 0.4 does not know these
    newer |= {"recompute_layer": True} if plan.recompute == "full" else {}
    rows = {
        "parallelism": {
            "dp": plan.dp,
            "tp": plan.tp,
            "pp": plan.pp,
            "expert_parallel_size": plan.ep,
            "pp_engine": engines[plan.schedule],
            "tp_mode": "REDUCE_SCATTER" if plan.sp else "ALL_REDUCE",
            "tp_linear_async_communication": plan.sp,
            **newer,
        },
        "optimizer": {"zero_stage": plan.zero},
        "model": {"dtype": word},
        "tokens": {
            "micro_batch_size": batch_of_rank(plan) or 1,
            "batch_accumulation_per_replica": accumulation(plan),
        },
    }
    return {"nanotron.yaml": _yaml(rows)}


def _yaml(rows: dict[str, Any], indent: str = "") -> str:
    """Sections of plain values."""
    lines = []
    for name, value in rows.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{name}:\n{_yaml(value, indent + '  ')}".rstrip("\n"))
        else:
            word = str(value).lower() if isinstance(value, bool) else value
            lines.append(f"{indent}{name}: " + (f"'{word}'" if word == "no" else f"{word}"))
    return "\n".join(lines) + "\n"
