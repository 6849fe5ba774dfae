"""Megatron-LM: command-line arguments and its pipeline layout.

Names are those of megatron/training/arguments.py (github.com/NVIDIA/Megatron-LM). A layout lists
the stages in order, `|` between them: E is the embedding, t a layer, L the head and loss. Ranks
take stages in turn, so a plan's chunks follow by themselves.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from foretell.errors import InputError
from foretell.plan.export.placed import Line, count, line, recompute, usual
from foretell.plan.export.say import ep_overlapped, overlapped, require, tp_overlapped
from foretell.plan.plan import Plan

_SAID = {
    "dp",
    "tp",
    "pp",
    "cp",
    "ep",
    "etp",
    "sp",
    "zero",
    "micro_batch",
    "global_batch",
    "schedule",
}
_SAID |= {
    "chunks",
    "recompute",
    "recompute_layers",
    "offload",
    "dtype",
    "grad_dtype",
    "optimizer",
    "overlap",
    "tp_overlap",
    "ep_overlap",
    "ep_dispatch",
    "cuda_graph",
    "layers",
}
_NUMBERS = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
    "--micro-batch-size": "micro_batch",
    "--global-batch-size": "global_batch",
}


def megatron(plan: Plan) -> dict[str, str]:
    """Its arguments; data parallel follows from the ranks that are started."""
    said = ""
    if plan.stages:
        plan, said = _from_stages(plan)
    require(plan, "Megatron", _SAID)
    if plan.zero > 1:
        raise InputError(
            f"zero={plan.zero} is not Megatron's distributed optimizer", hint="that is zero=1"
        )
    if plan.pp > 1 and plan.schedule not in ("1f1b", "interleaved", "actions"):
        raise InputError(f"Megatron runs 1f1b or interleaved, not {plan.schedule}")
    for name, word in (("dtype", plan.dtype), ("grad_dtype", plan.grad_dtype)):
        if word not in ("", "fp32", "bf16", "fp16" if name == "dtype" else "bf16"):
            raise InputError(f"no argument of Megatron is known here for {name}={word}")
    if plan.optimizer == "momentum":
        raise InputError("Megatron's sgd has no plan word for momentum", hint="use adam or sgd")
    lines = [f"# {plan.ranks} ranks, of which dp={plan.dp} are data parallel"]
    lines += [f"{a} {n}" for a, n in _numbers(plan)] + _words(plan)
    if plan.layers or said:
        lines.append(f"--pipeline-model-parallel-layout {shlex.quote(said or layout(plan))}")
    elif plan.chunks > 1:
        lines.append(f"--num-virtual-stages-per-pipeline-rank {plan.chunks}")
    return {"arguments.txt": "\n".join(lines) + "\n"}


def layout(plan: Plan) -> str:
    """The layers of each stage, the embedding with the first and the loss with the last."""
    stages = plan.pp * plan.chunks
    counts = [count(plan, s) for s in range(stages)]
    texts = [("E" if s == 0 else "") + _layers(n) for s, n in enumerate(counts)]
    return "|".join(texts) + "L"


def _from_stages(plan: Plan) -> tuple[Plan, str]:
    """A line of placed stages in degrees, and its layout: words and loss wherever they are."""
    found = line(plan, "Megatron")
    order = usual(found, max(len(row) for row in found.actions) // 2 // _chunks(found))
    if not order:
        raise InputError(
            "Megatron runs 1f1b or interleaved, and this plan has an order of its own",
            hint="schedule with --method 1f1b, or run the plan with `foretell run`",
        )
    texts = []
    for one in found.stages:
        first = [name for name, times in one.layers if not times]
        count = sum(times for _, times in one.layers)
        is_first, is_last = one is found.stages[0], one is found.stages[-1]
        if len(first) > is_first + is_last:
            raise InputError(f"Megatron's layout has no letter for `{first[-1]}` in a stage")
        has_last = is_last and bool(first) and (not is_first or len(first) > 1)
        texts.append("E" * (is_first and bool(first)) + _layers(count) + "L" * has_last)
    made = plan.but(
        stages=(), actions=(), pp=found.size, tp=found.width, chunks=_chunks(found), schedule=order,
        recompute=recompute(found, "Megatron"),
    )  # fmt: skip
    return made, "|".join(texts)


def _chunks(found: Line) -> int:
    return len(found.stages) // found.size


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
    words = {"fp32": "--accumulate-allreduce-grads-in-fp32", "bf16": "--grad-reduce-in-bf16"}
    found["grad_dtype"] = next((d for d, word in words.items() if word in given), "")
    found["recompute"] = given.get("--recompute-granularity", "none")
    if given.get("--recompute-method") == "block":
        found["recompute_layers"] = _number(given.get("--recompute-num-layers", "0"), "layers")
    found["offload"] = "--optimizer-cpu-offload" in given
    found["ep_overlap"] = True if "--overlap-moe-expert-parallel-comm" in given else None
    ways = {"alltoall": "rank", "flex": "node"}
    found["ep_dispatch"] = ways.get(given.get("--moe-token-dispatcher-type", ""), "")
    found["cuda_graph"] = _read_graph(given)
    found["optimizer"] = given.get("--optimizer", "")
    found |= _read_layout(given.get("--pipeline-model-parallel-layout", ""), found.get("pp", 1))
    plan = Plan(**found)
    if ranks % plan.ranks:
        raise InputError(f"{ranks} ranks are no multiple of the {plan.ranks} of one replica")
    return plan.but(dp=ranks // plan.ranks) if ranks else plan


def _read_graph(given: dict[str, str]) -> str:
    """What is replayed: layers, or the iteration as a whole."""
    how, what = (given.get(f"--cuda-graph-{name}", "") for name in ("impl", "scope"))
    if "full_iteration" in (how, what):
        return "iteration"
    return "layers" if how not in ("", "none") or "--enable-cuda-graph" in given else ""


def _read_layout(text: str, pp: int) -> dict[str, Any]:
    """Layers of each rank in a layout; `t*3`, `ttt` and `(t|)*3` are the same to Megatron."""
    if not text:
        return {}
    plain = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    plain = re.sub(r"([A-Za-z])\*(\d+)", lambda m: m[1] * int(m[2]), plain)
    stages = plain.split("|")
    odd = set(plain) - set("EtL|")
    if odd or len(stages) % pp:
        why = f"`{min(odd)}`" if odd else f"{len(stages)} stages for {pp} ranks"
        raise InputError(f"Megatron's layout `{text}` has {why}", hint="E, t, L and | are known")
    chunks = len(stages) // pp
    layers = tuple(sum(s.count("t") for s in stages[rank::pp]) for rank in range(pp))
    found: dict[str, Any] = {"chunks": chunks, "layers": layers}
    return found | {"schedule": "interleaved" if chunks > 1 else "1f1b"}


def _numbers(plan: Plan) -> list[tuple[str, int]]:
    pairs = [(name, getattr(plan, field)) for name, field in _NUMBERS.items()]
    always = ("batch", "expert-tensor")  # Megatron's own default of the latter is tp
    return [(name, n) for name, n in pairs if n and (n > 1 or any(w in name for w in always))]


def _words(plan: Plan) -> list[str]:
    some = plan.recompute_layers
    if some and plan.recompute == "selective":
        raise InputError(
            f"recompute=selective of {some} blocks a stage", hint="Megatron takes it of all or none"
        )
    flags = {
        "--sequence-parallel": plan.sp,
        "--use-distributed-optimizer": plan.zero == 1,
        "--overlap-grad-reduce": overlapped(plan, False) and plan.dp > 1,
        "--tp-comm-overlap": tp_overlapped(plan),
        "--overlap-moe-expert-parallel-comm": ep_overlapped(plan),
        "--moe-token-dispatcher-type alltoall": plan.ep > 1 and plan.ep_dispatch == "rank",
        "--moe-token-dispatcher-type flex": plan.ep > 1 and plan.ep_dispatch == "node",
        "--cuda-graph-impl local --cuda-graph-scope full_iteration": (
            plan.cuda_graph == "iteration"
        ),
        "--cuda-graph-impl transformer_engine": plan.cuda_graph == "layers",
        "--cuda-graph-scope attn mlp": plan.cuda_graph == "layers" and plan.ep == 1,
        "--cuda-graph-scope attn moe_router moe_preprocess": (
            plan.cuda_graph == "layers" and plan.ep > 1
        ),
        "--optimizer-cpu-offload": plan.offload,
        "--bf16": plan.dtype == "bf16",
        "--fp16": plan.dtype == "fp16",
        "--accumulate-allreduce-grads-in-fp32": plan.grad_dtype == "fp32",
        "--grad-reduce-in-bf16": plan.grad_dtype == "bf16",
        f"--optimizer {plan.optimizer}": bool(plan.optimizer),
        "--recompute-granularity selective": plan.recompute == "selective",
        "--recompute-granularity full": plan.recompute == "full",
        "--recompute-method uniform": plan.recompute == "full" and not some,
        "--recompute-num-layers 1": plan.recompute == "full" and not some,
        "--recompute-method block": plan.recompute == "full" and some > 0,
        f"--recompute-num-layers {some}": plan.recompute == "full" and some > 0,
    }
    return [flag for flag, is_on in flags.items() if is_on]


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
