"""Everything of a plan that `foretell run` cannot do, and why: the one list, without torch.

`plan`, `predict` and `run` read it; what is not here runs, and trains as one process does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretell.errors import InputError
from foretell.graph.graph import group_text, ranks_of
from foretell.plan.check import beside_groups, layer_groups
from foretell.plan.plan import Plan, Segment, segments_of
from foretell.plan.program import is_split

# what-ifs that have a way to be run; any other changes a prediction only
RUNNABLE = (
    "amp",
    "channels-last",
    "checkpoint",
    "compile",
    "cuda-graph",
    "foreach-optimizer",
    "fused-optimizer",
    "tf32",
)
PRECISIONS = ("fp32", "fp32-ieee", "tf32", "bf16-mixed", "fp16-mixed")  # as autocast has them
WORDS = ", ".join(PRECISIONS)


@dataclass(frozen=True)
class ModelFacts:
    """What a plan has to know of a model; all is taken to be there where nothing is known."""

    name: str = "the model"
    tensor_layers: int = 1  # linear layers that are known to split over tensor ranks
    token_blocks: int = 1  # blocks that are known to work on a part of the tokens
    why_no_images: str = ""  # why its images cannot be split
    expert_layers: int = 1  # modules that hold a matrix for each expert
    why_no_format: str = ""  # why it cannot compute in the plan's format here
    is_by_graph: bool = False  # split as its captured graph says: activations are DTensors


def unsupported(plan: Plan, model: ModelFacts | None = None) -> list[str]:
    """Every reason why a plan cannot be run; none where it can."""
    if plan.segments:
        return _odd_segments(plan, model)
    images = max(plan.spatial, default=1) > 1
    split = plan.filter > 1 or plan.channel > 1
    found = {
        "offload: only FSDP keeps optimizer state on the host (zero=2 or 3)": (
            plan.offload and plan.zero < 2
        ),
        "factors that ranks recompute (factors:recompute) are priced, not run": any(
            row[-1].startswith("factors:") for row in plan.sync
        ),
        "images are split beside tensors or stages": images and (plan.tp > 1 or plan.pp > 1),
        "filters or channels are split beside tensors, stages or images": (
            split and (plan.tp > 1 or plan.pp > 1 or images)
        ),
        "both filters and channels are split": plan.filter > 1 and plan.channel > 1,
        f"zero={plan.zero} beside split images, filters or channels": (
            plan.zero >= 2 and (images or split)
        ),
        f"zero=3 beside pp={plan.pp} with a backward in two (I and W): parameters are dropped "
        "between them, zero=2 keeps them": plan.zero == 3 and plan.pp > 1 and is_split(plan),
        f"shard={plan.shard} does not divide dp={plan.dp}": (
            plan.zero >= 2 and plan.dp % plan.sharing > 0
        ),
        f"shard={plan.shard} beside cp={plan.cp}": (
            plan.zero >= 2 and plan.cp > 1 and plan.sharing != plan.dp
        ),
        f"zero={plan.zero} with a choice of sync or buckets": (
            plan.zero >= 2 and bool(plan.sync or plan.buckets)
        ),
        f"recompute={plan.recompute} of split images": plan.recompute != "none" and images,
        f"dtype={plan.dtype}: ranks compute in fp32, tf32, bf16, fp16 or fp8": (
            plan.dtype not in ("", "fp32", "tf32", "bf16", "fp16", "fp8")
        ),
        f"precision={plan.precision}: ranks run {WORDS}, and matmuls in fp8 with dtype=fp8": (
            plan.precision not in ("", *PRECISIONS)
        ),
        "dtype=fp8 of layers that are split: their parts are no nn.Linear": (
            plan.dtype == "fp8" and (split or images or plan.tp * plan.cp > 1)
        ),
        "sync names sharded parameters and tp > 1": bool(plan.sync) and plan.tp > 1,
        "ep_overlap=yes: experts are exchanged between their matmuls, not beside another "
        "micro-batch": plan.ep_overlap is True and plan.ep > 1,
        "ep_dispatch=node: tokens go to each of their experts by all_to_all": (
            plan.ep_dispatch == "node" and plan.ep > 1
        ),
        f"cuda_graph={plan.cuda_graph}: ranks issue every kernel": bool(plan.cuda_graph),
    }
    reasons = [why for why, is_so in found.items() if is_so]
    reasons += _odd_model(plan, model or ModelFacts())
    more = (
        _odd_experts,
        _odd_counts,
        _odd_context,
        _odd_groups,
        _odd_stages,
        _odd_whatifs,
        _odd_sync,
        _odd_messages,
        _odd_ops,
    )
    return reasons + [why for odd in more for why in odd(plan)]


def own_plans(plan: Plan) -> tuple[Segment, ...]:
    """The segments of a plan, whatever its batch: as many samples as shares of a segment add up to,
    or one micro-batch."""
    listed = [text.partition(":")[2] for row in plan.segments for text in row if "shares:" in text]
    shared = max((sum(map(int, text.split("x"))) for text in listed), default=0)
    each = plan.micro_batch or plan.global_batch or shared
    each = each or math.prod(len(ranks_of(row[1])) for row in plan.segments)
    whole = plan.global_batch or shared or each
    return segments_of(plan.but(micro_batch=each, global_batch=whole), 0)


def _odd_segments(plan: Plan, model: ModelFacts | None) -> list[str]:
    """Why stages with meshes of their own cannot be run: what keeps any of them from it."""
    try:
        parts = own_plans(plan)
    except InputError as error:
        return [error.message]
    beside = ("actions", "buckets", "sync", "shares", "placement", "regions", "late", "groups")
    found = [f"segments beside {name}" for name in beside if getattr(plan, name)]
    found += ["segments beside update=by-message"] if plan.update == "by-message" else []
    for one in parts:
        name = f"segment `{one.blocks}+{group_text(one.ranks)}`"
        inner = [f"{axis}={n}" for axis in ("cp", "ep") if (n := getattr(one.plan, axis)) > 1]
        found += [f"{word} in {name}: segments have dp, tp, sp and zero" for word in inner]
        found += [f"{name}: {why}" for why in unsupported(one.plan, model)]
    return list(dict.fromkeys(found))


def in_own_loop(plan: Plan) -> list[str]:
    """Why a plan cannot be run in a training loop of one's own, where it takes its steps itself."""
    found = {
        "stages": bool(plan.stages),
        "groups": bool(plan.groups),
        "segments": bool(plan.segments),
        "actions": bool(plan.actions),
        f"schedule={plan.schedule}": plan.pp > 1 and plan.schedule not in ("1f1b", "gpipe"),
        "update=by-message": plan.update == "by-message",
    }
    why = [f"{word}: the plan has a loop of its own" for word, is_so in found.items() if is_so]
    beside = [
        f"{a}={n}" for a, n in plan.degrees().items() if n > 1 and a not in ("dp", "tp", "pp")
    ]
    beside += [f"zero={plan.zero}"] if plan.zero > 1 else []
    beside += ["ep"] if plan.ep > 1 else []
    alone = "stages inside a call of the model are beside dp, tp, zero=1 and recompute alone"
    return why + [f"pp={plan.pp} and {word}: {alone}" for word in beside if plan.pp > 1]


def in_script(plan: Plan) -> list[str]:
    """Why a plan cannot be run on a script with a loop of its own."""
    short = {plan.dtype, plan.precision.removesuffix("-mixed")}
    amp = [s for s in plan.whatifs if s.partition(":")[0] == "amp" and "fp16" in s]
    found = {
        "fp16: a script scales its own losses; bf16 needs no scaling": "fp16" in short or bool(amp),
        "fused or ordered ops: they are those of model() and loss() of a description": bool(
            plan.late or "." in plan.model
        ),
    }
    return in_own_loop(plan) + [why for why, is_so in found.items() if is_so]


def require_in_script(plan: Plan) -> None:
    """Raise where a script with a loop of its own cannot be run by a plan."""
    found = in_script(plan)
    if found:
        raise InputError(
            f"a script with a loop of its own cannot be run with {found[0]}",
            hint="define model(), batch(rank, size) and loss(output, target) in it",
        )


def _odd_model(plan: Plan, model: ModelFacts) -> list[str]:
    """What of a plan asks more of the model than is known of it."""
    layout = "give it an attribute `tensor_layout`: {layer: colwise | rowwise | sequence}, or an "
    layout += "example batch to find them with"
    found = {
        f"tp={plan.tp}: no layer of {model.name} is known to split; {layout}": (
            plan.tp > 1 and not model.tensor_layers
        ),
        f"{'cp' if plan.cp > 1 else 'sp'}: no block of {model.name} is known to work on a part of "
        f"the tokens; {layout}": (plan.sp or plan.cp > 1) and not model.token_blocks,
        f"spatial: the images of {model.name} cannot be split: {model.why_no_images}": (
            max(plan.spatial, default=1) > 1 and bool(model.why_no_images)
        ),
        f"dtype={plan.dtype}: {model.name}: {model.why_no_format}": bool(model.why_no_format),
        f"ep={plan.ep}: no module of {model.name} holds a matrix for each expert": (
            plan.ep > 1 and not model.expert_layers
        ),
        f"cp={plan.cp} beside zero={plan.zero}: parameters of {model.name} are DTensors over the "
        "ranks that share tokens": model.is_by_graph and plan.cp > 1 and plan.zero >= 2,
        f"compile: activations of {model.name} are DTensors under tp and cp": (
            model.is_by_graph and _compiles(plan)
        ),
    }
    return [why for why, is_so in found.items() if is_so]


def require_runnable(plan: Plan, model: ModelFacts | None = None) -> None:
    """Raise with every reason why a plan cannot be run."""
    reasons = unsupported(plan, model)
    if reasons:
        raise InputError(
            "this plan cannot be run:\n  " + "\n  ".join(reasons),
            hint="`foretell predict` prices it all the same",
        )


def _odd_counts(plan: Plan) -> list[str]:
    """Shares and placements that are not of the plan's ranks."""
    shares, placement = len(plan.shares), plan.placement
    found = {
        f"shares of {shares} ranks beside dp={plan.dp}": shares not in (0, plan.dp),
        f"a placement of {len(placement)} ranks; the plan has {plan.ranks}": (
            len(placement) not in (0, plan.ranks)
        ),
        f"placement={'+'.join(map(str, placement))} names a rank twice": (
            len(set(placement)) < len(placement)
        ),
    }
    return [why for why, is_so in found.items() if is_so]


def _odd_context(plan: Plan) -> list[str]:
    """What cannot be beside tokens that are split over ranks."""
    if plan.cp == 1:
        return []
    good = ("dp", "cp", "tp", "pp")
    wide = [f"{a}={n}" for a, n in plan.degrees().items() if n > 1 and a not in good]
    wide += [f for f in ("sync", "stages", "groups", "regions") if getattr(plan, f)]
    wide += [f"zero={plan.zero} and pp={plan.pp}"] if plan.zero >= 2 and plan.pp > 1 else []
    why = "tokens are split only over ranks that hold the same layers"
    return [f"cp={plan.cp} beside {word}: {why}" for word in wide]


def _compiles(plan: Plan) -> bool:
    return plan.compile or any(s.partition(":")[0] == "compile" for s in plan.whatifs)


def _odd_experts(plan: Plan) -> list[str]:
    """What cannot be beside experts that data-parallel ranks share."""
    if plan.ep == 1:
        return []
    good = ("dp", "pp", "tp", "cp")
    wide = [f"{a}={n}" for a, n in plan.degrees().items() if n > 1 and a not in good]
    wide += [f for f in ("sync", "stages", "groups", "regions") if getattr(plan, f)]
    wide += ["uneven shares"] if len(set(plan.shares)) > 1 else []
    wide += ["compile"] if _compiles(plan) else []
    wide += [f"etp={plan.etp} below tp={plan.tp}"] if plan.etp not in (0, plan.tp) else []
    why = "experts are shared by ranks of dp, beside tp, cp, pp and zero alone"
    found = [f"ep={plan.ep} beside {word}: {why}" for word in wide]
    if plan.dp % plan.ep:
        found.append(f"ep={plan.ep} does not divide dp={plan.dp}, whose ranks share the experts")
    return found


def _odd_groups(plan: Plan) -> list[str]:
    """Why layers on ranks of their own cannot be run."""
    if not plan.groups:
        return []
    found = beside_groups(plan)
    try:
        layer_groups(plan)
    except InputError as error:
        found.append(error.message)
    return found


def _odd_stages(plan: Plan) -> list[str]:
    """What cannot be beside stages that are placed one by one."""
    if not plan.stages:
        return []
    wide = [f"{name}={n}" for name, n in plan.degrees().items() if n > 1]
    found = {
        f"{', '.join(wide)} beside stages that are placed one by one": bool(wide),
        "stages without actions: their order is not given": not plan.actions,
        f"zero={plan.zero} beside stages": plan.zero > 0,
        "sync, buckets or shares beside stages: there is no data parallel": bool(
            plan.sync or plan.buckets or plan.shares
        ),
    }
    return [why for why, is_so in found.items() if is_so]


def _odd_messages(plan: Plan) -> list[str]:
    parts, buckets, found = plan.parts, len(plan.buckets), list[str]()
    if parts and (len(parts) != buckets or min(parts) < 1):
        found.append(f"parts={'+'.join(map(str, parts))} for {buckets} buckets")
    if plan.update == "by-message":
        beside = [f for f in ("zero", "sync", "stages", "groups") if getattr(plan, f)]
        beside += [f"pp={plan.pp}"] if plan.pp > 1 else []
        beside += ["dtype=fp16"] if plan.dtype == "fp16" else []
        found += [f"update=by-message beside {word}" for word in beside]
    return found


def _odd_ops(plan: Plan) -> list[str]:
    """Why ops cannot be fused or put in order."""
    named = [name for region in plan.regions for name in region] + list(plan.late)
    foreign = [name for name in named if "/" in name]
    if foreign:
        return [f"`{foreign[0]}` is an op of a workload: plan for what `foretell capture` wrote"]
    if not plan.late and "." not in plan.model:
        return []  # modules, or written by hand: the model will tell
    beside = [f"{axis}={n}" for axis, n in plan.degrees().items() if n > 1 and axis != "dp"]
    beside += [f for f in ("zero", "sync", "stages", "groups") if getattr(plan, f)]
    beside += [f"recompute={plan.recompute}"] if plan.recompute != "none" else []
    beside += [f"dtype={plan.dtype}"] if plan.dtype in ("bf16", "fp16") else []
    beside += [s for s in plan.whatifs if s.partition(":")[0] in ("amp", "checkpoint", "compile")]
    beside += ["compile"] if plan.compile else []
    return [f"fused or ordered ops beside {word}" for word in beside if named]


def _odd_whatifs(plan: Plan) -> list[str]:
    if any(spec.partition(":")[0] == "cuda-graph" for spec in plan.whatifs):
        beside = [f"{axis}={n}" for axis, n in plan.degrees().items() if n > 1]
        beside += [f for f in ("stages", "groups", "regions", "late") if getattr(plan, f)]
        beside += ["zero"] if plan.zero > 1 else []
        if beside:
            return [f"cuda-graph beside {', '.join(beside)}: a graph holds the work of one rank"]
    odd = [spec for spec in plan.whatifs if spec.partition(":")[0] not in RUNNABLE]
    return [f"what-if `{spec}`: there is no way to run it" for spec in odd]


def _odd_sync(plan: Plan) -> list[str]:
    return [
        f"sync `{'+'.join(row)}` is not a parameter and a way" for row in plan.sync if len(row) != 2
    ]
