"""PyTorch's own data parallel as a few lines of Python to paste: DDP and FSDP2."""

from __future__ import annotations

from foretell.errors import InputError
from foretell.plan.export.say import accumulation, batch_of_rank, require
from foretell.plan.plan import Plan

_SAID = {"dp", "micro_batch", "global_batch", "dtype", "recompute", "optimizer", "bucket_mb"}
_TORCH = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}

_OPTIMIZERS = {
    "": "torch.optim.Adam(model.parameters())",
    "adam": "torch.optim.Adam(model.parameters())",
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.01)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)",
}


def ddp(plan: Plan) -> dict[str, str]:
    """DistributedDataParallel with the plan's buckets.

    Its own list of bucket sizes takes any cut of the order in which gradients become ready; other
    groupings of parameters it cannot be given.
    """
    require(plan, "DDP", _SAID | {"overlap"})
    if plan.overlap is False:
        raise InputError("DDP always reduces during the backward")
    lines = [
        "import torch",
        "import torch.distributed as dist",
        "from torch.nn.parallel import DistributedDataParallel",
        "",
        "dist.init_process_group()  # started by: torchrun --nproc-per-node=" + str(plan.dp),
        *_recompute(plan),
        f"model = DistributedDataParallel(model, bucket_cap_mb={plan.bucket_mb:g})",
        f"optimizer = {_optimizer(plan)}",
        *_autocast(plan),
        *_accumulate(plan, "    model.require_backward_grad_sync = k + 1 == {num}"),
    ]
    return {"ddp.py": "\n".join(lines) + "\n"}


def fsdp2(plan: Plan) -> dict[str, str]:
    """fully_shard on each block and on the model, in the plan's precision."""
    require(plan, "FSDP2", _SAID | {"zero", "shard", "offload", "grad_dtype"})
    if plan.zero < 2:
        raise InputError(f"zero={plan.zero} is not FSDP2", hint="it is zero=2 or zero=3")
    for name, word in (("dtype", plan.dtype), ("grad_dtype", plan.grad_dtype)):
        if word and word not in _TORCH:
            raise InputError(f"FSDP2's mixed precision has no {name}={word}")
    lines = [
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard",
        "",
        _mesh(plan),
        "options = dict(",
        "    mesh=mesh,",
        f"    reshard_after_forward={plan.zero == 3},",
        f"    mp_policy=MixedPrecisionPolicy(param_dtype={_TORCH.get(plan.dtype)}, "
        f"reduce_dtype={_TORCH.get(plan.grad_dtype)}),",
        *(["    offload_policy=CPUOffloadPolicy(),"] if plan.offload else []),
        ")",
        *_recompute(plan),
        "for block in model.layers:  # the blocks of your model",
        "    fully_shard(block, **options)",
        "fully_shard(model, **options)",
        f"optimizer = {_optimizer(plan)}  # after sharding",
        *_accumulate(plan, "    model.set_requires_gradient_sync(k + 1 == {num})"),
    ]
    return {"fsdp2.py": "\n".join(lines) + "\n"}


def _optimizer(plan: Plan) -> str:
    if plan.optimizer not in _OPTIMIZERS:
        raise InputError(f"no few lines make the optimizer `{plan.optimizer}`")
    return _OPTIMIZERS[plan.optimizer]


def _accumulate(plan: Plan, sync: str) -> list[str]:
    """The loop over the micro-batches of a step, where the plan says how many there are."""
    num, samples = accumulation(plan), batch_of_rank(plan)
    if num == 1:
        return ["", f"# a step: {samples} samples on each rank"] if samples else []
    return [
        "",
        f"# a step: {num} micro-batches of {plan.micro_batch} samples on each rank",
        "for k, (x, y) in enumerate(micro_batches):",
        sync.format(num=num),
        f"    (loss(model(x), y) / {num}).backward()",
    ]


def _mesh(plan: Plan) -> str:
    parts = plan.sharing
    if parts == plan.dp:
        return f'mesh = init_device_mesh("cuda", ({plan.dp},), mesh_dim_names=("dp_shard",))'
    shape = f"({plan.dp // parts}, {parts})"
    return f'mesh = init_device_mesh("cuda", {shape}, mesh_dim_names=("dp_replicate", "dp_shard"))'


def _recompute(plan: Plan) -> list[str]:
    if plan.recompute == "none":
        return []
    if plan.recompute == "selective":
        raise InputError("selective recompute takes more than a few lines")
    return [
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (",
        "    apply_activation_checkpointing,",
        ")",
        "apply_activation_checkpointing(model, check_fn=lambda m: m in list(model.layers))",
    ]


def _autocast(plan: Plan) -> list[str]:
    if plan.dtype == "tf32":
        return ["torch.backends.cuda.matmul.allow_tf32 = True"]
    if plan.dtype in ("", "fp32"):
        return []
    if plan.dtype not in _TORCH:
        raise InputError(f"PyTorch's autocast has no dtype={plan.dtype}")
    return [
        "",
        "# around forward and loss:",
        f'# with torch.autocast("cuda", dtype={_TORCH[plan.dtype]}): …',
    ]
