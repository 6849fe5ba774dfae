"""A run predicted by its own ranks, before its first step, for the machine that they are on.

Each op of the captured step is timed alone, on all ranks at once, and so are the collectives of the
plan; how much of a core a rank gets says how busy the machine is. Where a plan splits no layer,
its step has a dry run with these times (→ dry_run.py), else it is priced from them. No step is
taken. What was timed is kept (→ machine.py), with what earlier runs taught, so that the next run
times only what is new.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from foretell.cluster.cluster import Calibration, Cluster
from foretell.cluster.node import Message
from foretell.cluster.read import load, loads, titled
from foretell.cost.price import TimedOp, TimedOps
from foretell.errors import ForetellError
from foretell.plan import Plan, check
from foretell.plan.framework import running
from foretell.predict import predict
from foretell.predict.predict import EIGHTY_PERCENT
from foretell.pytorch import timed
from foretell.pytorch.capture import capture
from foretell.pytorch.deploy import host_pace
from foretell.pytorch.deploy.batch_norm import norms
from foretell.pytorch.deploy.collective import all_gather, reduce_scatter
from foretell.pytorch.deploy.deferred import with_memory
from foretell.pytorch.deploy.dry_run import DryRun, Role, dry_run
from foretell.pytorch.deploy.machine import (
    BURN,
    SPREAD,
    Load,
    Machine,
    load_machine,
    probe,
    save_machine,
    usual,
)
from foretell.pytorch.deploy.op_times import (
    LocalPass,
    PricedOp,
    Profiled,
    Taken,
    first_apart,
    fits,
    priced_ops,
    shown_as,
)
from foretell.pytorch.deploy.precision import precision_of
from foretell.pytorch.ranks.links import line, this_machine
from foretell.pytorch.ranks.machine import cluster_text
from foretell.pytorch.ranks.pin import allowed
from foretell.pytorch.script import default_loss
from foretell.workload import Workload
from foretell.workload.captured import from_graph

Tensor = Any
_SENT = (4096, 65536, 1048576)  # bytes of the messages that are timed
_LARGEST = 16 * 2**20
_CACHE = 32 * 2**20  # bytes that a step writes between two messages of the same bucket
_REPEATS = 8
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
    device: str = "cpu"
    norm_group: Any = None  # ranks whose statistics a batch norm uses; None: its own
    alone: LocalPass | None = None  # how it is taken on a rank by itself; None: it cannot be


def captured(
    model: Any, batch: tuple[Tensor, ...], loss: Callable[..., Any] | None
) -> Callable[[str], Workload]:
    """How the step of a model on one rank's batch, inputs and target, is captured."""

    def found(on: str) -> Workload:
        with with_memory(model):
            return from_graph(capture(model, batch, loss or default_loss, None, on=on), "step")

    return found


class Predictor:
    """Times the ops of a step and predicts it; asked on every rank, answered on the first."""

    def __init__(self, step: Step, plan: Plan) -> None:
        self.step, self.ranks = step, dist.get_world_size()
        self.plan = self.asked = plan
        if not plan.global_batch and not plan.shares:
            self.plan = plan.but(global_batch=step.samples * plan.dp)
        if self.ranks * torch.get_num_threads() >= allowed():
            self.plan = self.plan.but(overlap=False)  # messages take the cores that work is done on
        self.machine = load_machine(this_machine(), self.ranks, torch.get_num_threads())
        self.size = 0.0  # bytes of the largest message
        self.answer: dict[str, Any] = {}
        self.known: dict[str, Any] | None = None  # the answer, where nothing is measured for it
        self.in_place = 1.0  # how many times as long as priced ops take in the model
        self.unsteady = 0.0  # standard error of the logarithm of a large message's seconds
        self.taken: Taken | None = None  # the model on a rank by itself
        self.dry: DryRun | None = None  # a step of the dry run
        self.workload: Workload | None = None

    def prepare(self) -> None:
        """Capture the step of the model that is not split yet, and time its ops."""
        box: list[Any] = [None]
        pace = self._host_pace() if self.step.device != "cpu" else 1.0
        if dist.get_rank() == 0:
            box[0] = self._on_gpus(pace) if self.step.device != "cpu" else self._asked()
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], dict):
            self.known = box[0]
            return
        ops, self.size = box[0]
        found = dict(zip(ops, _together([timed.seconds(op) for op in ops]), strict=True))
        seconds = {op: took for op, took in found.items() if took is not None}
        taken = self.taken = self._taken_alone()
        update = None if taken is None else taken.update
        seconds |= _updates(self.step, [op for op in ops if op.op == "optimizer"], update)
        launch = _together([timed.launch()])[0] or 0.0
        self.machine = self.machine.with_ops(seconds, launch)
        if dist.get_rank() == 0:
            save_machine(self.machine)
            if taken is not None:
                self.in_place = taken.compute / self._priced_alone()

    @property
    def why_not(self) -> str:
        """Why a step is not predicted, on every rank; nothing where it is."""
        return str((self.known or {}).get("why", ""))

    def predict(self, between: Callable[[], Any] | None = None) -> dict[str, Any]:
        """Seconds of a step with their interval, or why there are none: asked right before it.

        What changes from moment to moment is measured here: the load, messages under it, and what
        a rank does `between` two steps.
        """
        if self.known is not None:
            return self.known if dist.get_rank() == 0 else {}
        self.dry = dry_run(self._role(between), self.asked)
        if self.dry is not None:
            self.answer = {} if dist.get_rank() else self._as_dry_run(self.dry)
            return self.answer
        load = probe(self._piece())
        if torch.get_num_threads() > 1:  # work was timed by the wall, all ranks at once
            load = load._replace(busy=1.0, unsteady=0.0)
        sent = list(_messages(self.plan, self.size))
        self.unsteady = max((off for _, off in sent), default=0.0)
        messages = tuple(m._replace(start=max(m.start, load.late)) for m, _ in sent)
        self.answer = {} if dist.get_rank() else self._prediction(load, messages)
        return self.answer

    def _role(self, between: Callable[[], Any] | None) -> Role:
        """What the proxy model of the model has to act."""
        step, box = self.step, [0.0]
        passes = step.samples / self._at_once
        if self.taken is not None:
            box[0] = self.taken.compute * passes
        elif dist.get_rank() == 0:
            box[0] = self._priced_alone() * passes
        if self.taken is None:
            dist.broadcast_object_list(box, src=0)
        role = Role(
            step.model, step.optimizer, step.samples, box[0], is_synced=self._syncs, between=between
        )
        if self.taken is None:
            return role
        taken, self.taken = self.taken, replace(self.taken, again=None)  # which holds a copy
        return replace(
            role,
            again=taken.again,
            active=taken.active,
            parts=taken.parts,
            units=taken.units,
            in_buckets=self._has_buckets,
        )

    @property
    def _syncs(self) -> bool:
        """Whether batch norms wait for other ranks."""
        return self.step.norm_group is not None and self.plan.dp > 1

    def _as_dry_run(self, dry: DryRun) -> dict[str, Any]:
        """The prediction, from a dry run."""
        assert self.workload is not None
        step = self.machine.factor("step") * dry.seconds
        drift = _DRIFT["idle"] + _DRIFT["load"] * math.log(dry.load)
        wide = math.exp(EIGHTY_PERCENT * math.hypot(dry.unsure, drift))
        parts = dict(predict(self.plan, self.workload, self._as_timed()).breakdown)
        for name in ("exchange_s", "reduce_s"):
            parts[name] = 0.0
        if self.taken is not None:
            alone = self.taken.compute * self.step.samples / self._at_once
            parts["compute_s"] = alone / self.plan.pp
        parts["idle_s"] *= self.plan.pp > 1
        work = dry.load * sum(parts.values())
        parts = {name: min(dry.load, step / work) * took for name, took in parts.items()}
        left = max(step - sum(parts.values()), 0.0)
        parts["exchange_s" if self.plan.dp == 1 else "reduce_s"] = left
        return {
            "step_s": step,
            "low_s": step / wide,
            "high_s": step * wide,
            "load": dry.load,
            "waits_s": 0.0,
            "breakdown": parts,
            "runs": max((one.runs for one in self.machine.learned.values()), default=0),
        }

    def _piece(self) -> float:
        """Core seconds that a rank works between two messages of a step; the same on all ranks."""
        box = [0.0]
        if dist.get_rank() == 0 and self.workload is not None:
            many = self._actions if self.plan.pp > 1 else 1.0
            if self.plan.pp == 1 and (self.plan.zero >= 2 or self.plan.tp * self.plan.cp > 1):
                many = 3.0 * sum(layer.times for layer in self.workload.layers)
            box[0] = self._compute() / many
        dist.broadcast_object_list(box, src=0)
        return float(box[0])

    @property
    def _at_once(self) -> int:
        """Samples that a rank takes forward and back at once."""
        return min(self.plan.micro_batch or self.step.samples, self.step.samples)

    def _taken_alone(self) -> Taken | None:
        """The forward, backward and update of a rank by itself, of the slowest rank."""
        alone, plan = self.step.alone, self.plan
        is_plain = plan.precision in ("", "fp32") and plan.dtype in ("", "fp32")
        found = None
        if alone is not None and is_plain and fits(alone.model, self.ranks):
            if self._syncs and norms(alone.model):
                alone = replace(alone, alone=dist.new_subgroups(1)[0])
            many = max(round(self._actions / 2), 1)
            found = alone.taken(self._at_once, many, in_buckets=self._has_buckets)
        both = _together([None, None] if found is None else [found.compute, found.update])
        if found is None or both[0] is None or both[1] is None:
            return None
        return replace(found, compute=both[0], update=both[1])

    @property
    def _has_buckets(self) -> bool:
        """Whether gradients leave in buckets, right behind the only backward of a step."""
        return self.plan.dp > 1 and self.plan.zero < 2 and self._actions <= 2

    def _priced_alone(self) -> float:
        """The forward and backward of a rank by itself as priced."""
        assert self.workload is not None
        plan = Plan(
            dp=self.ranks,
            global_batch=self._at_once * self.ranks,
            framework=self.plan.framework,
            optimizer=self.plan.optimizer,
        )
        cluster = self._as_timed()
        return float(predict(plan, self.workload, cluster).breakdown["compute_s"])

    @property
    def _actions(self) -> float:
        """Forwards and backwards of a rank in a step."""
        return 2.0 * self.step.samples / (self.plan.micro_batch or self.step.samples)

    def _compute(self) -> float:
        """Core seconds of a rank's compute in a step, on the machine without load."""
        assert self.workload is not None
        cluster = self._as_timed()
        return float(predict(self.plan, self.workload, cluster).breakdown["compute_s"])

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

    def _on_gpus(self, pace: float) -> dict[str, Any]:
        """The same from a data sheet and fitted prices, where the GPU is a known one.

        A rank runs PyTorch's operators, its host as fast as it was found to be.
        """
        device = titled(torch.cuda.get_device_name())
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        if device is None:
            return {"why": f"prices of a {torch.cuda.get_device_name()} are not known"}
        if here > torch.cuda.device_count():
            return {"why": "ranks share a GPU, which is not priced"}
        try:
            self.workload = self.step.workload(device.name)
            machines = load(f"{device.name}:gpus={self.ranks}").calibrated(Calibration(host=pace))
            found = predict(_as_run(self.plan), self.workload, machines)
        except Exception as error:
            return {"why": f"{type(error).__name__}: {error}"[:200]}
        return {"step_s": found.step, "low_s": found.low, "high_s": found.high, "load": 1.0,
                "breakdown": found.breakdown, "runs": 0}  # fmt: skip

    def _asked(self) -> tuple[list[TimedOp], float] | dict[str, Any]:
        """Ops of the step that were not timed yet, and the bytes of its largest message.

        A step that cannot be captured or priced gets a note, and the run goes on.
        """
        try:
            self.workload = self.step.workload("cpu")
            ops = TimedOps(self.machine.seconds)
            predict(self.plan, self.workload, self._machines(self.machine, ops))
        except ForetellError as error:
            return {"why": error.message}
        except Exception as error:
            return {"why": f"{type(error).__name__}: {error}"[:200]}
        return list(ops.asked), 4.0 * self.workload.parameters

    def _as_timed(self) -> Cluster:
        """The ranks of this machine as a cluster, their ops as timed without load."""
        return self._machines(self.machine, TimedOps(self.machine.seconds))

    def _machines(
        self, machine: Machine, ops: TimedOps, messages: Iterable[Message] = ()
    ) -> Cluster:
        """The ranks of this machine as a cluster."""
        fit = {"ranks": self.ranks, "bandwidth": 1e9, "latency": 1e-4}
        found = loads(cluster_text(dict(machine.facts), fit, {}))
        (node, count), *_ = found.groups
        device = replace(node.devices[0], timed=ops, launch=machine.launch * ops.load)
        groups = ((replace(node, devices=(device,)), count),)
        families = {n: machine.factor(n) for n in machine.learned if n not in _WHOLE}
        calibration = Calibration(
            host=machine.factor("host"),
            families=tuple(sorted(families.items())),
            messages=tuple(messages),
        )
        return replace(found, groups=groups, _ways={}, _levels={}).calibrated(calibration)

    def _prediction(self, found_load: Load, messages: tuple[Message, ...]) -> dict[str, Any]:
        assert self.workload is not None
        load, machine = found_load.busy, self.machine
        seconds = {  # an update was timed in its place
            op: took / self.in_place if op.op == "optimizer" else took
            for op, took in machine.seconds.items()
        }
        ops = TimedOps(seconds, load * self.in_place)
        cluster = self._machines(machine, ops, messages)
        found = predict(self.plan, self.workload, cluster)
        step = found.step
        # work that is longer than what was timed for the load sees more of its mean
        sigma = found_load.unsteady * min(1.0, BURN / step) ** 0.5
        drift = _DRIFT["idle"] + _DRIFT["load"] * math.log(found_load.others)
        comm = math.log1p(math.expm1(self.unsteady) * found.breakdown["reduce_s"] / step)
        down, up = (
            math.exp(EIGHTY_PERCENT * math.hypot(wide / EIGHTY_PERCENT, sigma, drift, comm))
            for wide in (math.log(found.step / found.low), math.log(found.high / found.step))
        )
        return {
            "step_s": step,
            "low_s": step / down,
            "high_s": step * up,
            "load": found_load.others,
            "waits_s": 0.0,
            "breakdown": found.breakdown,
            "runs": max((one.runs for one in self.machine.learned.values()), default=0),
        }

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


def _updates(step: Step, asked: list[TimedOp], in_place: float | None) -> dict[TimedOp, float]:
    """Seconds of the script's own optimizer, on all parameters and on a part of them.

    `in_place`: of all, where they were updated in a step.
    """
    shapes = [p.shape for p in step.model.parameters() if p.requires_grad]
    found: dict[TimedOp, float] = {}
    times = 1.0  # as long as alone
    for part in (1, 4):
        some = shapes[: max(len(shapes) // part, 1)]
        count = sum(shape.numel() for shape in some)
        if count > _PARAMETERS or not asked:
            continue
        held = [torch.nn.Parameter(torch.randn(shape)) for shape in some]
        for one in held:
            one.grad = torch.randn_like(one)
        optimizer = step.optimizer(_OptimizerInputs(held))
        if optimizer is None:
            return {}
        took = _together([timed.timed(optimizer.step)])[0]
        size = dict(asked[0].shape)
        row = {"n": float(count), "bytes": round(size["bytes"] / size["n"] * count, 3)}
        if took is not None:
            times = in_place / took if in_place is not None and part == 1 else times
            found[TimedOp("optimizer", asked[0].dtype, tuple(sorted(row.items())))] = times * took
    return found


def _messages(plan: Plan, size: float) -> Iterable[tuple[Message, float]]:
    """The collectives of a plan as they are now, over as many ranks as its axes have.

    And how sure the mean of the largest is: the standard error of its logarithm.
    """
    wide = {plan.dp * plan.cp, plan.sharing, plan.tp, plan.cp, plan.ep, dist.get_world_size()}
    for ranks in sorted(n for n in wide if n > 1 and dist.get_world_size() % n == 0):
        group, _ = dist.new_subgroups(ranks)
        for op, run in _OPS.items():
            rows = [(sent, _sent(run, sent, ranks, group)) for sent in _sizes(size)]
            took = [usual(seconds) for _, seconds in rows]
            start, slope = line(
                torch.tensor([float(s) for s, _ in rows]).numpy(), torch.tensor(took).numpy()
            )
            largest = rows[-1][1].log()
            yield Message(op, ranks, start, slope), float(largest.std()) / len(largest) ** 0.5
    if plan.pp > 1:
        rows = [(sent, _passed(sent)) for sent in _sizes(size)]
        (small, first), (large, last) = rows[0], rows[-1]
        slope = max((last - first) / (large - small), 0.0)
        yield Message("send", 2, max(first - slope * small, 0.0), slope), 0.0


def _of_slowest(took: list[float]) -> Tensor:
    """Seconds of the slowest rank, but for the first time."""
    slowest = torch.tensor(took[1:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest


def _sizes(size: float) -> list[int]:
    largest = int(min(max(size, 2 * _SENT[-1]), _LARGEST)) // 4096 * 4096
    return [*_SENT, largest]


def _sent(run: Any, size: int, ranks: int, group: Any) -> Tensor:
    """Seconds of a collective, each time."""
    tensor, others = torch.zeros(size // 4 // ranks * ranks), torch.zeros(_CACHE // 4)
    took = []
    for _ in range(_REPEATS + 1):
        others.add_(1.0)  # what a step writes before it comes to its messages
        tensor.fill_(1.0)
        dist.barrier()
        start = time.perf_counter()
        run(tensor, ranks, group)
        took.append(time.perf_counter() - start)
    return _of_slowest(took)


def _passed(size: int) -> float:
    """Seconds of a message to a neighbour: half of there and back."""
    rank, tensor = dist.get_rank(), torch.zeros(size // 4)
    other, took = rank ^ 1, []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        for way in (0, 1):
            if other < dist.get_world_size():
                (dist.send if rank % 2 == way else dist.recv)(tensor, other)
        took.append((time.perf_counter() - start) / 2)
    return statistics.median(took[1:])


def _reduce_scatter(tensor: Tensor, ranks: int, group: Any) -> None:
    reduce_scatter(tensor[: len(tensor) // ranks].clone(), tensor, group=group)


def _all_gather(tensor: Tensor, ranks: int, group: Any) -> None:
    all_gather(tensor, tensor[: len(tensor) // ranks].clone(), group=group)


_OPS = {
    "all_reduce": lambda tensor, ranks, group: dist.all_reduce(tensor, group=group),
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
}
