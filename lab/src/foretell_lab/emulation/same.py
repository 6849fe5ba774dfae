"""Whether a plan trains as one process does: on ranks of the laboratory, over its links."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from foretell.plan import Plan
from foretell.pytorch.deploy.apply import deploy
from foretell.pytorch.deploy.checkpoint import parameters
from foretell_lab.emulation import models

Job = dict[str, Any]


def same(job: Job) -> dict[str, Any]:
    """How far some steps of a plan end from those of one process, relative to each parameter."""
    plan, kind = Plan.parse(job["plan"]), models.model(job["model"])
    shares = list(plan.shares) or [plan.global_batch // plan.dp] * plan.dp
    deployed, alone = _made(kind), _made(kind)
    mine = deploy(*deployed, plan, loss=models.loss, device="cpu", samples=shares[0])
    for step in range(job["steps"]):
        torch.manual_seed(100 + step)
        x, y = kind.batch(plan.global_batch)
        alone[1].zero_grad()
        models.loss(alone[0](x), y).backward()
        alone[1].step()
        if not plan.groups:
            x, y = (t.split(shares)[dist.get_rank()] for t in (x, y))
        mine.step((x,), y)
    wanted = dict(alone[0].named_parameters())
    found = {n: p for n, p in parameters(mine) if n in wanted}
    off = [_off(p.detach(), wanted[n].detach()) for n, p in found.items()]
    return {"off": max(off, default=0.0), "parameters": len(found)}


def _made(kind: models.Model) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return models.trained(kind.make())


def _off(found: Any, wanted: Any) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())
