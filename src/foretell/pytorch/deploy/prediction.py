"""A run predicted by its own ranks, before its first step, for the machine that they are on.

A copy of the model is deployed, and a step of it has a dry run (→ dry_run.py); no step of the plan
itself is taken. Each op of the captured step is timed alone besides, on all ranks at once, to say
what a step is spent on, and which op takes another time in it. What was timed is kept (→
machine.py), with what earlier runs taught, so that the next run times only what is new.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from foretell.cluster.cluster import Calibration, Cluster
from foretell.cluster.read import load, loads, titled
from foretell.cost.price import TimedOp, TimedOps
from foretell.errors import ForetellError, InputError
from foretell.plan import Plan, check
from foretell.plan.framework import running
from foretell.predict import predict
from foretell.predict.predict import EIGHTY_PERCENT
from foretell.pytorch import timed
from foretell.pytorch.capture import capture
from foretell.pytorch.deploy import host_pace
from foretell.pytorch.deploy.deferred import with_memory
from foretell.pytorch.deploy.dry_run import DryRun, agreed, dry_run, fits, recorded
from foretell.pytorch.deploy.machine import SPREAD, load_machine, save_machine
from foretell.pytorch.deploy.op_times import (
    PricedOp,
    Profiled,
    first_apart,
    priced_ops,
    shown_as,
)
from foretell.pytorch.deploy.precision import precision_of
from foretell.pytorch.ranks.links import this_machine
from foretell.pytorch.ranks.machine import cluster_text
from foretell.pytorch.ranks.pin import allowed
from foretell.pytorch.script import default_loss
from foretell.workload import Workload
from foretell.workload.captured import from_graph

Tensor = Any
_PARAMETERS = 2**26  # that an optimizer is timed on at most
_LITTLE = 0.02  # of a step: parts below it teach nothing
_LONG = 2e-5  # seconds of an op: shorter ones are mostly Python, the dispatcher and autograd
_QUIET = 1.3  # wall over core seconds, up to which a step says more of the model than of the load
_DRIFT = SPREAD["drift"]
_WHOLE = ("host", "step")  # factors that are of no family of ops


@dataclass(frozen=True)
class Step:
    """What is predicted: a model, how its step is captured, and what trains it."""

    model: Any
    samples: int  # of one data-parallel rank
    workload: Callable[[str], Workload]  # of its step, with the kernels of a device
    optimizer: Callable[[Any], Any]  # of whatever has `parameters()`; None where none can be made
    device: str
    # deploys a copy of the model as the run does, on all ranks; takes a step of it
    deploy_copy: Callable[[], Callable[[], object]]


def captured(
    model: Any, batch: tuple[Tensor, ...], loss: Callable[..., Any] | None
) -> Callable[[str], Workload]:
    """How the step of a model on one rank's batch, inputs and target, is captured."""

    def found(on: str) -> Workload:
        with with_memory(model):
            return from_graph(capture(model, batch, loss or default_loss, None, on=on), "step")

    return found


class Predictor:
    """Predicts a step; called on every rank, answered on the first."""

    def __init__(self, step: Step, plan: Plan) -> None:
        self.step, self.ranks = step, dist.get_world_size()
        self.plan = plan
        if not plan.global_batch and not plan.shares:
            self.plan = plan.but(global_batch=step.samples * plan.dp)
        if self.ranks * torch.get_num_threads() >= allowed():
            self.plan = self.plan.but(overlap=False)  # messages take the cores that work is done on
        self.machine = load_machine(this_machine(), self.ranks, torch.get_num_threads())
        self.take: Callable[[], object] | None = None  # a step of a copy that is deployed
        self.dry: DryRun | None = None  # a step of the dry run
        self.priced: dict[str, Any] | None = None  # the answer, where it is from prices
        self.why = ""  # there is no answer
        self.workload: Workload | None = None

    def prepare(self) -> None:
        """Deploy a copy of the model, and time the ops of the captured step."""
        if self.step.device != "cpu":
            self._price_on_gpus()
            return
        self.take = self._copy()
        box = [self._untimed() if dist.get_rank() == 0 and self.take is not None else []]
        dist.broadcast_object_list(box, src=0)
        found = dict(zip(box[0], _together([timed.seconds(op) for op in box[0]]), strict=True))
        seconds = {op: took for op, took in found.items() if took is not None}
        seconds |= _updates(self.step, [op for op in box[0] if op.op == "optimizer"])
        launch = _together([timed.launch()])[0] or 0.0
        self.machine = self.machine.with_ops(seconds, launch)
        if dist.get_rank() == 0:
            save_machine(self.machine)

    def _copy(self) -> Callable[[], object] | None:
        """A step of a copy of the model, deployed; None where it does not fit or cannot be made."""
        if not agreed(fits(self.step.model, self.ranks)):
            self.why = "a copy of the model does not fit beside it"
            return None
        take, why = None, ""
        with torch.random.fork_rng(devices=[]):
            try:
                take = self.step.deploy_copy()
            except ForetellError as error:
                why = f" ({error.message})"
            except Exception as error:  # deploying the model itself says more
                why = f" ({type(error).__name__}: {error})"[:200]
        if agreed(take is not None):
            return take
        self.why = f"no copy of the model can take its step{why}"
        return None

    def predict(self, between: Callable[[], Any] | None = None) -> dict[str, Any]:
        """Seconds of a step with their interval, or why there are none: called right before it.

        `between`: what a rank does between two steps.
        """
        recording = None
        if self.take is not None:
            recording, self.why = recorded(self.take)
        self.take = None  # which holds the copy
        if recording is not None:
            self.dry = dry_run(recording, between)
        if dist.get_rank():
            return {}
        if self.dry is not None:
            return self._as_dry_run(self.dry)
        return self.priced or {"why": self.why}

    def _as_dry_run(self, dry: DryRun) -> dict[str, Any]:
        """The prediction, from a dry run."""
        step = self.machine.factor("step") * dry.seconds
        drift = _DRIFT["idle"] + _DRIFT["load"] * math.log(dry.load)
        wide = math.exp(EIGHTY_PERCENT * math.hypot(dry.unsure, drift))
        return {
            "step_s": step,
            "low_s": step / wide,
            "high_s": step * wide,
            "load": dry.load,
            "waits_s": 0.0,
            "breakdown": self._parts(dry, step),
            "runs": max((one.runs for one in self.machine.learned.values()), default=0),
        }

    def _parts(self, dry: DryRun, step: float) -> dict[str, float]:
        """What a step is spent on: work as it is priced, on messages what is left of the step."""
        found = {"compute_s": 1.0, "exchange_s": 1.0}
        if self.workload is not None:
            found = dict(predict(self.plan, self.workload, self._as_timed()).breakdown)
        messages = {name: found.pop(name, 0.0) for name in ("exchange_s", "reduce_s")}
        idle = found.pop("idle_s", 0.0) * (self.plan.pp > 1)
        work = min(dry.load * dry.work, step)
        parts = _shared(found, work) | _shared(messages | {"idle_s": idle}, step - work)
        return {name: parts.get(name, 0.0) for name in (*found, "exchange_s", "reduce_s", "idle_s")}

    def _host_pace(self) -> float:
        """Seconds of the slowest rank's host over those of the host that prices are from."""
        word, device = precision_of(self.plan) or "fp32", titled(torch.cuda.get_device_name())
        if device is None:
            return 1.0
        box = [self.machine.pace.get(f"{device.name} {word}")]
        dist.broadcast_object_list(box, src=0)
        if box[0] is not None:
            return float(box[0])
        took = _together([host_pace.measured(word, self.step.device)])[0]
        if dist.get_rank() or took is None:
            return 1.0
        found = took / host_pace.priced(word, device.name)
        self.machine = self.machine.with_pace(f"{device.name} {word}", found)
        save_machine(self.machine)
        return found

    def _price_on_gpus(self) -> None:
        """Predict from a data sheet and fitted prices, where the GPU is a known one."""
        pace, box = self._host_pace(), list[Any]([None, ""])
        if dist.get_rank() == 0:
            try:
                box = [self._on_gpus(pace), ""]
            except ForetellError as error:
                box = [None, error.message]
            except Exception as error:
                box = [None, f"{type(error).__name__}: {error}"[:200]]
        dist.broadcast_object_list(box, src=0)
        self.priced, self.why = box

    def _on_gpus(self, pace: float) -> dict[str, Any]:
        """A rank runs PyTorch's operators, its host as fast as it was found to be."""
        device = titled(torch.cuda.get_device_name())
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        if device is None:
            raise InputError(f"prices of a {torch.cuda.get_device_name()} are not known")
        if here > torch.cuda.device_count():
            raise InputError("ranks share a GPU, which is not priced")
        self.workload = self.step.workload(device.name)
        machines = load(f"{device.name}:gpus={self.ranks}").calibrated(Calibration(host=pace))
        found = predict(_as_run(self.plan), self.workload, machines)
        return {"step_s": found.step, "low_s": found.low, "high_s": found.high, "load": 1.0,
                "breakdown": found.breakdown, "runs": 0}  # fmt: skip

    def _untimed(self) -> list[TimedOp]:
        """Ops of the step that were not timed yet; none of a step that cannot be priced."""
        try:
            self.workload = self.step.workload("cpu")
            ops = TimedOps(self.machine.seconds)
            predict(self.plan, self.workload, self._machines(ops))
        except Exception:  # whatever a model may do: it has a dry run all the same
            self.workload = None
            return []
        return list(ops.queried)

    def _as_timed(self) -> Cluster:
        """The ranks of this machine as a cluster, their ops as timed without load."""
        return self._machines(TimedOps(self.machine.seconds))

    def _machines(self, ops: TimedOps) -> Cluster:
        """The ranks of this machine as a cluster."""
        machine, fit = self.machine, {"ranks": self.ranks, "bandwidth": 1e9, "latency": 1e-4}
        found = loads(cluster_text(dict(machine.facts), fit, {}))
        (node, count), *_ = found.groups
        device = replace(node.devices[0], timed=ops, launch=machine.launch)
        groups = ((replace(node, devices=(device,)), count),)
        families = {n: machine.factor(n) for n in machine.learned if n not in _WHOLE}
        calibration = Calibration(
            host=machine.factor("host"), families=tuple(sorted(families.items()))
        )
        return replace(found, groups=groups, _ways={}, _levels={}).calibrated(calibration)

    def ops(self) -> list[PricedOp]:
        """The ops of a step of one rank alone, in order, as priced without load."""
        plan = self.plan
        if self.workload is None or plan.ranks != plan.dp or plan.groups or plan.zero >= 2:
            return []  # of a model that is split a rank's ops are others, and FSDP has its own
        cluster = self._as_timed()
        plan = check(plan, self.workload, cluster)
        return priced_ops(self.workload, running(plan), self.step.samples, cluster.devices[0])

    def _ratios(
        self, seen: Profiled, cpu: float, ops: list[PricedOp]
    ) -> tuple[dict[str, float], float]:
        """How many times as long as priced families of ops took; what is left of `cpu` seconds."""
        ratios: dict[str, float] = {}
        rest = cpu
        for family in sorted({shown_as(op.family) for op in ops}):
            own = [op for op in ops if shown_as(op.family) == family]
            alone = sum(op.seconds for op in own)
            took = seen.families.get(family, 0.0)
            is_long = max(alone, took) > max(_LONG * len(own), _LITTLE * cpu) and took > 0
            ratio = took / alone if is_long else 1.0
            if is_long:
                ratios |= dict.fromkeys({op.family for op in own}, ratio)
            rest -= ratio * alone
        return ratios, rest

    def learn(
        self, profiled: Profiled, cpu: float, step: float, load: float
    ) -> dict[str, Any] | None:
        """Keep how much longer than alone ops took in a step; the first that parts, if one does.

        `cpu` are the core seconds of the quickest step: others share caches with what else runs.
        On a quiet machine what `step` took beside that of the dry run is kept, too.
        """
        ops = self.ops()
        if not ops:
            return None
        rest = cpu - profiled.families.get("optimizer", 0.0)
        ratios, rest = self._ratios(profiled, rest, ops)
        ratios["host"] = rest / (len(ops) * self.machine.launch)
        if self.dry is not None and max(load, self.dry.load) < _QUIET:
            ratios["step"] = step / self.dry.seconds
        save_machine(self.machine.with_run(ratios))
        return first_apart(ops, profiled.forward)


def _as_run(plan: Plan) -> Plan:
    """The plan that is priced: in PyTorch's operators; its CUDA graphs are those of a step."""
    graphs = [spec for spec in plan.whatifs if spec.partition(":")[0] == "cuda-graph"]
    others = tuple(spec for spec in plan.whatifs if spec not in graphs)
    own = plan.framework or ("fsdp" if plan.zero >= 3 else "ddp")
    return plan.but(framework=own, whatifs=others, cuda_graph="iteration" if graphs else "")


def _shared(parts: dict[str, float], whole: float) -> dict[str, float]:
    """Parts in proportion that add up to a whole; the first has it where all are 0."""
    total = sum(parts.values())
    if not total:
        return dict(zip(parts, (whole, *[0.0] * len(parts)), strict=False))
    return {name: whole * part / total for name, part in parts.items()}


def _together(mine: list[float | None]) -> list[float | None]:
    """The slowest rank's of each; None where a rank has none."""
    if not mine:
        return []
    rows = torch.tensor([math.inf if x is None else x for x in mine], dtype=torch.float64)
    dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    return [None if math.isinf(x) else x for x in rows.tolist()]


class _OptimizerInputs:
    """Parameters as an optimizer wants them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.held = parameters

    def parameters(self) -> list[Tensor]:
        return self.held


def _updates(step: Step, ops: list[TimedOp]) -> dict[TimedOp, float]:
    """Seconds of the script's own optimizer, on all parameters and on a part of them."""
    shapes = [p.shape for p in step.model.parameters() if p.requires_grad]
    found: dict[TimedOp, float] = {}
    for part in (1, 4):
        some = shapes[: max(len(shapes) // part, 1)]
        count = sum(shape.numel() for shape in some)
        if count > _PARAMETERS or not ops:
            continue
        held = [torch.nn.Parameter(torch.randn(shape)) for shape in some]
        for one in held:
            one.grad = torch.randn_like(one)
        optimizer = step.optimizer(_OptimizerInputs(held))
        if optimizer is None:
            return {}
        took = _together([timed.timed(optimizer.step)])[0]
        size = dict(ops[0].shape)
        row = {"n": float(count), "bytes": round(size["bytes"] / size["n"] * count, 3)}
        if took is not None:
            found[TimedOp("optimizer", ops[0].dtype, tuple(sorted(row.items())))] = took
    return found
