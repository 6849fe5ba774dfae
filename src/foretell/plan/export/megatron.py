"""Megatron-LM: command-line arguments and its pipeline layout.

Names are those of megatron/training/arguments.py (github.com/NVIDIA/Megatron-LM). A layout lists
the stages in order, `|` between them: E is the embedding, t a layer, L the head and loss. Ranks
take stages in turn, so a plan's chunks follow by themselves.
"""

from __future__ import annotations

import shlex
from typing import Any

from foretell.errors import InputError
from foretell.plan.export.say import require
from foretell.plan.plan import Plan

_SAID = {"dp", "tp", "pp", "cp", "ep", "sp", "zero", "micro_batch", "global_batch", "schedule"}
_SAID |= {"chunks", "recompute", "offload", "dtype", "grad_dtype", "optimizer", "overlap", "layers"}
_NUMBERS = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--micro-batch-size": "micro_batch",
    "--global-batch-size": "global_batch",
}


def megatron(plan: Plan) -> dict[str, str]:
    """Its arguments; data parallel follows from the ranks that are started."""
    require(plan, "Megatron", _SAID)
    if plan.zero > 1:
        raise InputError(
            f"zero={plan.zero} is not Megatron's distributed optimizer", hint="that is zero=1"
        )
    if plan.pp > 1 and plan.schedule == "gpipe":
        raise InputError("Megatron runs 1f1b or interleaved, not gpipe")
    if plan.optimizer == "momentum":
        raise InputError("Megatron's sgd has no plan word for momentum", hint="use adam or sgd")
    lines = [f"# {plan.ranks} ranks, of which dp={plan.dp} are data parallel"]
    lines += [f"{a} {n}" for a, n in _numbers(plan)] + _words(plan)
    if plan.layers:
        lines.append(f"--pipeline-model-parallel-layout {shlex.quote(layout(plan))}")
    elif plan.chunks > 1:
        lines.append(f"--num-virtual-stages-per-pipeline-rank {plan.chunks}")
    return {"arguments.txt": "\n".join(lines) + "\n"}


def layout(plan: Plan) -> str:
    """The layers of each stage, the embedding with the first and the loss with the last."""
    stages = plan.pp * plan.chunks
    counts = [_count(plan, s) for s in range(stages)]
    texts = [("E" if s == 0 else "") + _layers(n) for s, n in enumerate(counts)]
    return "|".join(texts) + "L"


def read_megatron(text: str, ranks: int = 0) -> Plan:
    """The plan in Megatron's arguments; `ranks` tells how many are data parallel."""
    given = _given(text)
    found: dict[str, Any] = {
        field: _number(given[name], name) for name, field in _NUMBERS.items() if name in given
    }
    found["sp"] = "--sequence-parallel" in given
    found["zero"] = int("--use-distributed-optimizer" in given)
    found["chunks"] = _number(given.get("--num-virtual-stages-per-pipeline-rank", "1"), "chunks")
    found["schedule"] = "interleaved" if found["chunks"] > 1 else "1f1b"
    found["dtype"] = next((d for d in ("bf16", "fp16") if f"--{d}" in given), "")
    found["recompute"] = given.get("--recompute-granularity", "none")
    found["offload"] = "--optimizer-cpu-offload" in given
    found["optimizer"] = given.get("--optimizer", "adam")
    plan = Plan(**found)
    if ranks % plan.ranks:
        raise InputError(f"{ranks} ranks are no multiple of the {plan.ranks} of one replica")
    return plan.but(dp=ranks // plan.ranks) if ranks else plan


def _numbers(plan: Plan) -> list[tuple[str, int]]:
    pairs = [(name, getattr(plan, field)) for name, field in _NUMBERS.items()]
    return [(name, n) for name, n in pairs if n and (n > 1 or "batch" in name)]


def _words(plan: Plan) -> list[str]:
    flags = {
        "--sequence-parallel": plan.sp,
        "--use-distributed-optimizer": plan.zero == 1,
        "--overlap-grad-reduce": plan.overlap is True,
        "--optimizer-cpu-offload": plan.offload,
        "--bf16": plan.dtype == "bf16",
        "--fp16": plan.dtype == "fp16",
        "--accumulate-allreduce-grads-in-fp32": plan.grad_dtype == "fp32",
        f"--optimizer {plan.optimizer}": plan.optimizer != "adam",
        "--recompute-granularity selective": plan.recompute == "selective",
        "--recompute-granularity full": plan.recompute == "full",
        "--recompute-method uniform": plan.recompute == "full",
        "--recompute-num-layers 1": plan.recompute == "full",
    }
    return [flag for flag, is_on in flags.items() if is_on]


def _count(plan: Plan, stage: int) -> int:
    """Layers of a stage: those of its rank, dealt out over the rank's chunks."""
    rank, chunk = stage % plan.pp, stage // plan.pp
    return plan.layers[rank] // plan.chunks + (chunk < plan.layers[rank] % plan.chunks)


def _layers(num: int) -> str:
    return f"t*{num}" if num > 1 else "t" * num


def _given(text: str) -> dict[str, str]:
    """Arguments and what follows each, if it is not an argument itself."""
    words = shlex.split(text, comments=True)
    found = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            value = words[place + 1] if place + 1 < len(words) else ""
            found[word] = "" if value.startswith("--") else value
    return found


def _number(text: str, where: str) -> int:
    if not text.isdecimal():
        raise InputError(f"`{where}` of Megatron's arguments is `{text}`, not a whole number")
    return int(text)
