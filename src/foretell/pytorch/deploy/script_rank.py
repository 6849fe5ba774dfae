"""One rank of `foretell run` on a script with a loop of its own.

reference   the script alone, its first steps: losses and gradients are written down
compare     the same steps under the plan: the first tensor that parts is named
train       the script under the plan, to its end or for as many steps as were asked for
"""

from __future__ import annotations

import atexit
import math
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.pytorch.deploy.run_files import RunRequest, StepLog

STEPS = 3  # that are compared: momentum shows in the second, what it does in the third
# times the limits of the first step: an adaptive update makes a whole step of the sign that a
# rounding leaves
_LATER = 100.0
_UNDECIDED = 10.0  # times that again, where gradients are what rounding leaves of zero
_ROUNDED = 1e-6  # of a tensor's largest gradient: what rounding leaves


def run(request: RunRequest, folder: Path, rank: int, heartbeat: Any) -> dict[str, Any]:
    """Run the script; what this rank measured."""
    _one_gpu()
    from foretell.pytorch.deploy.unedited import Training, Wanted
    from foretell.pytorch.deploy.worker import done, failed, joined
    from foretell.pytorch.intake import child
    from foretell.pytorch.intake.files import Journal
    from foretell.pytorch.intake.request import Script

    device = joined(request)
    is_short = request.goal != "train"
    steps = STEPS if is_short else request.steps and request.warmup + request.steps
    script = Script(request.script, request.args, request.is_module)
    _forget_job(script)

    def enough() -> None:
        done(folder, rank, _result(job, request, folder, rank), heartbeat)

    def fail(error: InputError) -> None:
        failed(folder, rank, error, heartbeat.phase)

    job = Training(
        None if request.goal == "reference" else Plan.parse(request.plan),
        Wanted(steps, request.batch_norm, device, is_still=is_short, kept=STEPS * is_short),
        enough,
        fail,
        lambda words: heartbeat.enter(words, job.steps / steps if steps and job.steps else None),
        Path(tempfile.mkdtemp(prefix="foretell-rank-")),
        StepLog(folder, is_on=rank == 0).write if not is_short and rank == 0 else None,
        _predictor(request, device) if request.captured and not is_short else None,
    )
    if is_short:
        home = Path.cwd() if script.is_module else Path(script.name).resolve().parent
        Journal(folder, str(folder / "none"), Path.cwd(), home).begin()
    heartbeat.enter("model")
    with job.open():
        try:
            child.run(script, job)
        except SystemExit as left:
            if left.code not in (None, 0):
                raise InputError(
                    f"`{script}` exited with {left.code}",
                    hint=f"what it printed is in {folder}/rank-{rank}.log",
                ) from None
        atexit._run_exitfuncs()  # what is written now is the first rank's alone, too
    return _result(job, request, folder, rank)


def _predictor(request: RunRequest, device: str) -> Any:
    """How a step of the script is predicted, from its captured graph; made when a model is met."""
    from foretell.graph import load
    from foretell.pytorch.deploy.prediction import Predictor, Step
    from foretell.workload.captured import from_graph

    plan = Plan.parse(request.plan)
    # in a loop of its own stages take all forwards first, and its batches are not cut else
    plan = plan.but(schedule="gpipe") if plan.pp > 1 else plan.but(micro_batch=0)

    def made(model: Any, optimizers: Any, deploy_copy: Any) -> Predictor:
        graph = load(Path(request.captured))

        def deployed() -> Any:
            if sum(p.numel() for p in model.parameters()) < int(graph.facts.get("parameters", 0)):
                raise InputError("the script trains several models in one step")
            return deploy_copy(_calls(graph.facts.get("reads", {})))

        step = from_graph(graph, "step")
        found = Predictor(
            Step(
                model,
                max(step.batch // plan.dp, 1),
                lambda on: step,
                lambda held: _another(optimizers, held),
                device,
                deployed,
            ),
            plan,
        )
        found.prepare()
        return found

    return made


def _calls(reads: dict[str, Any]) -> int:
    """How often a step calls its model: as often as one op reads the parameter least read."""
    count: Counter[tuple[str, str]] = Counter()
    for name, rows in reads.items():
        op = name.rpartition(".")[0]
        if not op.startswith(("_foreach", "_fused")) and not op.endswith("_"):  # updates, clipping
            count.update({(weight, op) for weight, _ in rows})
    most: dict[str, int] = {}
    for (weight, _), times in count.items():
        most[weight] = max(most.get(weight, 0), times)
    return min(most.values(), default=1)


def _another(optimizers: Any, held: Any) -> Any:
    """An optimizer like the script's own, of other parameters; None where it takes more."""
    try:
        return type(optimizers[0])(held.parameters(), **optimizers[0].defaults)
    except Exception:  # the script's own class: it may want whatever it likes
        return None


def _one_gpu() -> None:
    """Let a rank see its own GPU alone, which the script takes for the only one."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = Path("/proc/driver/nvidia/gpus")
    ids = own.split(",") if own else [str(k) for k, _ in enumerate(there.glob("*"))]
    if len(ids) >= int(os.environ["LOCAL_WORLD_SIZE"]) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ids[int(os.environ["LOCAL_RANK"])]


def _forget_job(script: Any) -> None:
    """To the script this is a job of one rank, or none at all."""
    from foretell.pytorch.intake.child import single_rank

    names = [n for n in os.environ if n.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))]
    names += ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    for name in names:
        os.environ.pop(name, None)
    os.environ.setdefault("WANDB_MODE", "offline")
    single_rank(script)


def _result(job: Any, request: RunRequest, folder: Path, rank: int) -> dict[str, Any]:
    from foretell.pytorch.deploy.worker import peak_bytes
    from foretell.pytorch.intake.request import no_step

    losses = [float(x) for x in job.losses]
    compared = None
    if request.goal == "reference":
        _write(folder / "reference.npz", job, losses)
    elif request.goal == "compare":
        compared = _compared(folder / "reference.npz", job, losses)
    if not losses:
        raise no_step(request.script)
    if request.goal != "reference" and not job.made:
        raise InputError(
            f"no model of `{request.script}` is called and trained by an optimizer of torch's",
            hint="`foretell capture` shows what it does",
        )
    warm = request.warmup if len(job.times) > request.warmup else 0
    load = 1 + sum(job.waits[warm:]) / max(sum(job.cpu[warm:]), 1e-9)
    return {
        "predicted": job.predicted, "load": load,
        "peak_bytes": peak_bytes(job.wanted.device), "losses": losses,
        "steps_s": job.times[warm:], "rank": rank,
        "weight": 1.0, "verified": compared, "notes": job.notes,
    }  # fmt: skip


def _write(path: Path, job: Any, losses: list[float]) -> None:
    """Losses and gradients, without pickle."""
    import numpy

    rows = {
        f"{step}/{name}": grad.float().numpy()
        for step, grads in enumerate(job.gradients)
        for name, grad in grads.items()
    }
    numpy.savez(path, losses=numpy.array(losses), **rows)


def _compared(path: Path, job: Any, losses: list[float]) -> dict[str, Any]:
    """How far this run is from one process; raise where it is too far."""
    import numpy
    import torch

    from foretell.pytorch.deploy import verify
    from foretell.pytorch.deploy.precision import precision_of

    with numpy.load(path) as file:
        wanted = {name: torch.from_numpy(rows) for name, rows in file.items()}
    alone = wanted.pop("losses").tolist()
    grads = [g for step in job.gradients for g in step.values()]
    # the script itself may compute in a shorter format than fp32
    rough = precision_of(job.plan) in ("bf16", "fp16", "fp8") or job.has_autocast
    rough |= any(g.dtype in (torch.bfloat16, torch.float16) for g in grads)
    seen = verify.Seen()
    for step, (mine, one) in enumerate(zip(losses, alone, strict=False)):
        limit = verify.ROUGH if rough else verify.LOSS * (_LATER if step else 1.0)
        seen.note(step, "loss", "", verify.loss_off(mine, one), limit)
    later = _LATER * (_UNDECIDED if _is_undecided(wanted) else 1.0)
    for step, grads in enumerate(job.gradients):
        rows = {n.partition("/")[2]: g for n, g in wanted.items() if n.startswith(f"{step}/")}
        most, limit = verify.largest(rows), verify.GRADIENT * (later if step else 1.0)
        for name, one in rows.items():
            off = verify.tensor_off(grads[name], one, most) if name in grads else math.inf
            seen.note(step, "gradient", name.partition(".")[2], off, math.inf if rough else limit)
    found = tuple(seen.differences)
    verify.require_equal(
        verify.Verdict(len(job.gradients), len(wanted), seen.loss_off, seen.gradient_off, found)
    )
    return {"steps": min(len(losses), len(alone)), "tensors": len(wanted),
            "loss_off": seen.loss_off, "gradient_off": seen.gradient_off}  # fmt: skip


def _is_undecided(gradients: dict[str, Any]) -> bool:
    """Whether some gradients of the first step are nothing but roundings.

    An adaptive optimizer makes whole steps of their signs, which differ from run to run.
    """
    first = [abs(g) for name, g in gradients.items() if name.startswith("0/") and g.numel()]
    return any(bool(((g > 0) & (g < _ROUNDED * g.max())).any()) for g in first)
