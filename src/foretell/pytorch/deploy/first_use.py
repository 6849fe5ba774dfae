"""When a plan is compared with one process: the first time it runs a model, if that fits in memory.

What has been found equal is kept by a fingerprint of script, parameters, plan and torch, in
`$XDG_CACHE_HOME/foretell/verified`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foretell.plan import Plan
from foretell.pytorch.deploy import run_files
from foretell.pytorch.deploy.agree import fingerprint
from foretell.pytorch.deploy.verify import Case, require_equal, verify

STEPS = 3  # momentum shows in the second, what it does to gradients in the third
_COPIES = 5  # of the parameters that one process holds: gradients, two of an optimizer, a reserve


def verified(
    case: Case, plan: Plan, source: str, *, always: bool, enter: Callable[[str], None]
) -> dict[str, Any] | None:
    """Compare, or say why not; raise where the plan trains differently. Called on every rank."""
    if plan.actions and not any(set("BIW") & set(cell) for row in plan.actions for cell in row):
        return None  # nothing is trained
    model = case.model()
    path = run_files.kept("verified") / f"{_key(plan, model, source, case.batch_norm)}.json"
    need = _COPIES * sum(p.numel() * p.element_size() for p in model.parameters())
    del model
    before: dict[str, Any] | None = None if always else run_files.read(path)
    before, why = _same((before, "" if before else _why_not(need, case.device)))
    if before:
        return before | {"before": True}
    if why:
        return {"skipped": why}
    enter("verify")
    found = verify(case, plan, STEPS)
    require_equal(found)
    shown = asdict(found)
    shown.pop("differences")
    if dist.get_rank() == 0:
        run_files.keep(path, {"plan": str(plan)} | shown)
    return shown


def _key(plan: Plan, model: Any, source: str, batch_norm: str) -> str:
    parts = (fingerprint(plan, model), source, batch_norm, torch.__version__)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _why_not(need: int, device: str) -> str:
    """Why it is not compared, or nothing."""
    free = _free(device)
    if need > free:
        held, left = need / 2**30, free / 2**30
        return f"one process would need {held:.1f} GiB beside this one, {left:.1f} are free"
    return ""


def _same(said: Any) -> Any:
    """What the first rank says."""
    box = [said]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _free(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    rows = dict(line.split(":", 1) for line in lines)
    return float(rows["MemAvailable"].split()[0]) * 1024
