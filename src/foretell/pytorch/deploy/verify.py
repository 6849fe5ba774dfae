"""A plan's first steps compared with one process, the first time it runs a model.

The first rank trains the same model alone, on the whole batch, and every rank compares what it
holds with that, tensor by tensor. One process takes the micro-batches of the plan, so that it needs
no more memory than a rank of plain data parallel does. Dropout is off on both sides.

When a plan is compared with one process: the first time it runs a model, if that fits in memory.

What has been found equal is kept by a fingerprint of script, parameters, plan and torch, in
`$XDG_CACHE_HOME/foretell/verified`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from foretell.errors import InputError
from foretell.plan import Plan
from foretell.pytorch.deploy import run_files
from foretell.pytorch.deploy.apply import deploy
from foretell.pytorch.deploy.batch_norm import norms
from foretell.pytorch.deploy.checkpoint import buffers, gradients, parameters, still
from foretell.pytorch.deploy.collective import everyones, fingerprint, place, said_by
from foretell.pytorch.deploy.pipelined import micro_batches, pieces
from foretell.pytorch.deploy.precision import mixed, precision_of, scaler
from foretell.pytorch.script import default_loss

STEPS = 3  # momentum shows in the second, what it does to gradients in the third
_COPIES = 5  # of the parameters that one process holds: gradients, two of an optimizer, a reserve


Tensor = Any
Part = tuple[tuple[Tensor, ...], Tensor | None]  # inputs and target of one data-parallel rank
UPDATED = 10.0  # times that of gradients: Adam makes a whole step of the sign that rounding leaves
ROUGH = 0.05  # of losses in the formats of the plan itself: bf16 has a last digit of 2^-8
_LEAST = 0.05  # of the largest gradient: much smaller ones may be what rounding leaves of zero


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
    before, why = said_by(0, (before, "" if before else _why_not(need, case.device)))
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
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else run_files.free_memory()
    if need > free:
        held, left = need / 2**30, free / 2**30
        return f"one process would need {held:.1f} GiB beside this one, {left:.1f} are free"
    return ""


LOSS, GRADIENT = 1e-6, 1e-5  # relative, in fp32; buffers as gradients


@dataclass(frozen=True)
class Difference:
    """A tensor that is not what one process has."""

    step: int
    what: str  # loss, gradient, parameter, buffer
    name: str
    off: float  # relative to its largest value
    rank: int = 0

    def __str__(self) -> str:
        named = f"{self.what} `{self.name}`" if self.name else self.what
        return f"{named} of step {self.step} is off by {self.off:.2g}"


@dataclass(frozen=True)
class Verdict:
    """How far the steps of a plan were from one process, and the tensors that were too far."""

    steps: int
    tensors: int  # compared, over all steps
    loss_off: float
    gradient_off: float
    differences: tuple[Difference, ...] = ()

    @property
    def is_equal(self) -> bool:
        return not self.differences


@dataclass
class Case:
    """What is trained: factories, since it is trained twice."""

    model: Callable[[], Any]  # the same parameters on every call
    optimizer: Callable[[Any], Any]  # of a model
    parts: Callable[[int], list[Part]]  # of a step: the batch of each data-parallel rank
    loss: Callable[[Any, Any], Any] | None = None
    device: str = "cpu"
    batch_norm: str = "sync"
    max_norm: float = 0.0
    whole: Callable[[], Any] | None = None  # the model with values, where `model` has none


def verify(
    case: Case, plan: Plan, steps: int = 3, *, in_fp32: bool = True, **options: Any
) -> Verdict:
    """Train a few steps by a plan and alone, and compare; called on every rank.

    What is compared is how the work is split, so all is computed in fp32. Else, where the plan has
    shorter formats, only losses are compared, and roughly.
    """
    if in_fp32:
        plan = precise(plan)
    is_rough = precise(plan) != plan
    alone = _Alone(case, plan) if dist.get_rank() == 0 else None
    model = case.model()
    if not any(p.is_meta for p in model.parameters()):
        model.to(case.device)
    still(model)
    at = place(plan, dist.get_rank())["dp"]
    first = case.parts(0)[at]
    made = deploy(
        model,
        case.optimizer(model),
        plan,
        loss=case.loss,
        device=case.device,
        samples=len(first[0][0]),
        example=first,
        batch_norm=case.batch_norm,
        max_norm=case.max_norm,
        **options,
    )
    if alone is not None:
        alone.nums = _micro_batches(made, [len(inputs[0]) for inputs, _ in case.parts(0)])
    seen = Seen(ROUGH if is_rough else LOSS, math.inf if is_rough else GRADIENT)
    for step in range(steps):
        wanted = _wanted(alone, step)
        loss = made.step(*case.parts(step)[at])
        _compare_loss(seen, step, loss, made.share, wanted.pop("", None))
        _compare(seen, step, "gradient", dict(gradients(made)), wanted)
    _compare(seen, steps - 1, "parameter", dict(parameters(made)), alone and alone.parameters())
    _compare(seen, steps - 1, "buffer", buffers(made), alone and alone.buffers())
    return _agreed(seen, steps)


def _wanted(alone: _Alone | None, step: int) -> dict[str, Any]:
    """What one process finds, on the first rank; where it refuses a batch, all raise its words."""
    found, why = dict[str, Any](), ""
    try:
        found = alone.step(step) if alone is not None else found
    except ValueError as error:  # a layer's own words for a batch that it is not for
        why = f"one process cannot train on such micro-batches: {error}"
    why = why if step else said_by(0, why)
    if why:
        raise InputError(why, hint="take a larger micro_batch")
    return found


def precise(plan: Plan) -> Plan:
    """The same plan with everything in fp32."""
    whatifs = tuple(w for w in plan.whatifs if w.partition(":")[0] not in ("amp", "tf32"))
    dtype = "fp32" if plan.dtype in ("bf16", "fp16", "fp8", "tf32") else plan.dtype
    return plan.but(dtype=dtype, precision="", grad_dtype="", whatifs=whatifs)


def require_equal(verdict: Verdict) -> None:
    """Raise, naming the first tensor, where a plan does not train as one process does."""
    if verdict.is_equal:
        return
    first = verdict.differences[0]
    more = len(verdict.differences) - 1
    raise InputError(
        f"the plan does not train as one process does: {first} (rank {first.rank})"
        + (f", and {more} more" if more else ""),
        hint="a loss that is a mean over samples, and layers that see one sample at a time, are "
        "the same under every plan; random numbers that a forward draws are not. --no-verify runs "
        "it all the same",
    )


class _Alone:
    """The same model on this process only."""

    def __init__(self, case: Case, plan: Plan) -> None:
        self.case, self.plan, self.nums = case, plan, list[int]()
        self.model = (case.whole or case.model)().to(case.device)
        still(self.model)
        self.optimizer = case.optimizer(self.model)
        self.loss = case.loss or default_loss
        self.scaler = scaler(precision_of(plan), case.device)

    def step(self, step: int) -> dict[str, Tensor]:
        """The gradients of one step by name, and its loss under no name."""
        self.optimizer.zero_grad()
        parts = self.case.parts(step)
        shares = [len(inputs[0]) for inputs, _ in parts]
        total = sum(self._backward(piece, weight) for piece, weight in self._pieces(parts, shares))
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.case.max_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.max_norm)
        made = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        made = {n: g.detach().clone() for n, g in made.items()}
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return made | {"": torch.as_tensor(total)}

    def _pieces(self, parts: list[Part], shares: list[int]) -> list[tuple[Part, float]]:
        """Micro-batches of one process: those that ranks take at the same time, together.

        With local statistics each is taken alone.
        """
        nums = self.nums or [1] * len(parts)
        rows = [pieces(*part, num) for part, num in zip(parts, nums, strict=True)]
        if norms(self.model) and self.case.batch_norm == "local":
            each = zip(rows, shares, nums, strict=True)
            return [(piece, n / sum(shares) / num) for row, n, num in each for piece in row]
        found = []
        for m in range(max(nums)):  # of uneven shares some ranks have fewer
            some = [k for k, num in enumerate(nums) if m < num]
            weight = sum(shares[k] / nums[k] for k in some) / sum(shares)
            found.append((_joined([rows[k][m] for k in some]), weight))
        return found

    def _backward(self, part: Part, weight: float) -> float:
        inputs, target = part
        with mixed(precision_of(self.plan), self.case.device):
            loss = self.loss(self.model(*inputs), target)
        weighed = loss * weight
        (weighed if self.scaler is None else self.scaler.scale(weighed)).backward()
        return float(loss.detach()) * weight

    def parameters(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self.model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())


def _micro_batches(made: Any, shares: list[int]) -> list[int]:
    """In how many pieces each data-parallel rank takes its samples."""
    if len(set(shares)) > 1 and not made.plan.actions:
        return [micro_batches(made.plan, n) for n in shares]
    if len(set(shares)) > 1:
        return [1] * len(shares)
    if made.pipeline is not None:
        return [made.pipeline.parts] * len(shares)
    return [micro_batches(made.plan, n) for n in shares]


def _joined(parts: Sequence[Part]) -> Part:
    inputs = tuple(torch.cat(each) for each in zip(*(p[0] for p in parts), strict=True))
    return inputs, None if parts[0][1] is None else torch.cat([p[1] for p in parts])


@dataclass
class Seen:
    """What this rank has compared."""

    loss: float = LOSS  # limits
    limit: float = GRADIENT
    tensors: int = 0
    wanted: set[tuple[int, str, str]] = field(default_factory=set)  # known to the first rank
    names: set[tuple[int, str, str]] = field(default_factory=set)  # step, what, name
    loss_off: float = 0.0
    gradient_off: float = 0.0
    differences: list[Difference] = field(default_factory=list)

    def note(self, step: int, what: str, name: str, off: float, limit: float) -> None:
        self.tensors += 1
        self.names.add((step, what, name))
        if what == "loss":
            self.loss_off = max(self.loss_off, off)
        elif what == "gradient":
            self.gradient_off = max(self.gradient_off, off)
        if not off <= limit:
            self.differences.append(Difference(step, what, name, off, dist.get_rank()))


def _compare_loss(seen: Seen, step: int, loss: Any, share: float, wanted: Any) -> None:
    """The mean over ranks that know theirs, by their shares of the batch."""
    mine = None if loss is None else (float(loss.detach()), share)
    known = [pair for pair in everyones(mine) if pair is not None]
    if wanted is None or not known:
        return
    mean = sum(x * w for x, w in known) / sum(w for _, w in known)
    off = loss_off(mean, float(wanted))
    seen.note(step, "loss", "", off, seen.loss * (1 + step))  # updates carry roundings on


def loss_off(mine: float, wanted: float) -> float:
    """How far a loss is off: of outputs of order one, it may be a difference of such."""
    return abs(mine - wanted) / max(abs(wanted), 0.5)


def _compare(seen: Seen, step: int, what: str, mine: dict[str, Any], wanted: Any) -> None:
    """Each tensor here with that of the first rank, which sends it to all."""
    device = next((t.device for t in mine.values() if t is not None), torch.device("cpu"))
    rows = [(n, tuple(t.shape), t.dtype) for n, t in (wanted or {}).items()]
    rows, most = said_by(0, (rows, largest(wanted or {})))
    missing = set(mine) - {n for n, _, _ in rows}
    limit = seen.limit * (UPDATED if what == "parameter" else 1.0)
    for name, shape, dtype in rows:
        sent = wanted[name].contiguous() if wanted else torch.empty(shape, dtype=dtype)
        sent = sent.to(device)
        dist.broadcast(sent, src=0)
        if mine.get(name) is not None:
            seen.note(step, what, name, tensor_off(mine[name], sent, most), limit)
    if wanted:
        seen.wanted |= {(step, what, name) for name in wanted}
    for name in missing:  # nothing reached it alone
        if mine[name] is not None and what == "gradient":
            seen.note(step, what, name, float(mine[name].double().abs().max() > 0), seen.limit)


def largest(tensors: dict[str, Tensor]) -> float:
    """The largest value of some tensors."""
    some = (t.detach().double() for t in tensors.values() if t.numel())  # flags too
    return max((float(t.abs().max()) for t in some), default=0.0)


def tensor_off(mine: Tensor, wanted: Tensor, largest: float) -> float:
    """How far a tensor is off, relative to its largest value or a part of the largest of all."""
    if mine.shape != wanted.shape:
        return math.inf
    if not mine.numel():
        return 0.0
    off = float((mine.detach().double() - wanted.double()).abs().max())
    scale = max(float(wanted.double().abs().max()), _LEAST * largest, 1e-12)
    return off / scale if math.isfinite(off) else math.inf


def _agreed(seen: Seen, steps: int) -> Verdict:
    """One verdict for all ranks; the earliest difference first."""
    found = Verdict(steps, seen.tensors, seen.loss_off, seen.gradient_off, tuple(seen.differences))
    each = everyones((found, seen.names, seen.wanted))
    order = {"loss": 1, "gradient": 0, "parameter": 2, "buffer": 3}
    every = [d for v, _, _ in each for d in v.differences]
    held = {key for _, names, _ in each for key in names}
    for _, _, wanted in each:
        every += [Difference(s, what, name, math.inf) for s, what, name in sorted(wanted - held)]
    return replace(
        found,
        tensors=sum(v.tensors for v, _, _ in each),
        loss_off=max(v.loss_off for v, _, _ in each),
        gradient_off=max(v.gradient_off for v, _, _ in each),
        differences=tuple(sorted(every, key=lambda d: (d.step, order[d.what], d.rank))),
    )
