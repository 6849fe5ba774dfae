"""Batch norm whose statistics are those of all ranks that share a batch, on any device.

    mean = Σ_r Σ x / Σ_r n        var = Σ_r Σ (x − mean)² / Σ_r n        r: ranks, n: values of each

torch's own SyncBatchNorm is for GPUs alone. With local statistics (DDP's default) a model trains
differently for every number of ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from foretell.pytorch.deploy.buckets import ALIKE
from foretell.pytorch.deploy.collective import copy_in, sum_both

Tensor = Any
Module = Any
WORDS = ("sync", "local")


def norms(model: Module) -> list[str]:
    """The layers that use statistics of the batch while they train."""
    return [n for n, m in model.named_modules() if isinstance(m, _BatchNorm)]


def synchronize_norms(model: Module, group: Any, weight: float = 1.0) -> None:
    """Let every batch norm of a model use the statistics of the samples of all ranks of a group.

    The group is its own, so that gradients do not wait for it nor it for them.

    `weight` is what this rank's loss counts by, where the gradients are weighed after the backward.
    """
    for layer in [m for m in model.modules() if isinstance(m, _BatchNorm)]:
        layer.forward = partial(normalize, layer, group, weight=weight)
        setattr(layer, ALIKE, True)


def normalize(
    norm: Module, group: Any, x: Tensor, *, weight: float = 1.0, parts: Any = None
) -> Tensor:
    """Batch norm over the samples of a group; `parts`: ranks that hold parts of one image."""
    scale, shift = norm.weight, norm.bias
    if parts is not None:  # their gradients are of one sample: summed here, not by data parallel
        scale = None if scale is None else copy_in(scale, parts)
        shift = None if shift is None else copy_in(shift, parts)
    if not norm.training and norm.track_running_stats:
        return nn.functional.batch_norm(
            x, norm.running_mean, norm.running_var, scale, shift, False, 0.0, norm.eps
        )
    if not norm.training:  # no statistics kept: those of the batch, of this rank alone
        return nn.functional.batch_norm(x, None, None, scale, shift, True, 0.0, norm.eps)
    kind, x = x.dtype, x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    mine = torch.cat([x.sum(dims), x.new_tensor([x.numel() / x.shape[1]])])
    total = sum_both(mine, group, weight)
    count = total[-1].detach()
    mean = total[:-1] / count
    centred = x - mean.view(shape)
    var = sum_both(centred.square().sum(dims), group, weight) / count
    if norm.track_running_stats:
        norm.num_batches_tracked += 1
        rate = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        norm.running_mean.lerp_(mean.detach(), rate)
        norm.running_var.lerp_((var * count / (count - 1)).detach(), rate)
    y = centred * torch.rsqrt(var + norm.eps).view(shape)
    if scale is not None:
        y = y * scale.view(shape)
    return (y if shift is None else y + shift.view(shape)).to(kind)
