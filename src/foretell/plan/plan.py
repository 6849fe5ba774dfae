"""A layout as data, and its file.

A plan as plain data: which rank runs which part of a step, in which order, what is kept, its
segments.

    Plan.parse("dp=4,tp=8,pp=2,micro_batch=1,global_batch=512,recompute=full,schedule=1f1b")

`str()` gives such a text back, `foretell.plan.plan` reads and writes it as JSON or TOML. Written by
hand or found by a planner, a plan lowers and deploys the same. Words are those of PyTorch.

Segments of a plan: layers in a row on a mesh of ranks, with degrees and memory of their own.

    segments=12+0-7+tp:4/20+8-23+tp:2+zero:1+recompute:full,micro_batch=8

A row has the number of blocks, the ranks in mesh order (tp innermost, dp outermost), then what the
segment does its own way; what it does not say is as in the plan. dp is what the other degrees leave
of its ranks. `micro_batch` counts the samples of all replicas of a segment together: every segment
works on the same micro-batches. `shares:12x12x4` gives its replicas so many samples of a step each,
not as many as the others. Degrees (`dp=4,tp=2,pp=2`) are segments that are all alike.

Which ranks communicate with each other along an axis, and what they see of the cluster.

Ranks are numbered with `tp` innermost, then `cp`, the splits of images and channels, `dp`, and `pp`
outermost, as Megatron does: the axis with most communication stays in a node. All groups of an axis
look alike on a regular cluster, so one stands for all; its neighbours communicate at the same time.

A plan on disk: JSON (`.plan`, `.json`) or TOML (`.toml`), only the fields that are not plain.

A plan that was searched for carries what was predicted of it, for which model and cluster: the
table `predicted`, which changes nothing of the plan.

Names of the ops of a captured step in a plan, and a fingerprint of that step.

    gelu.0              the first gelu of forward and loss
    mm.3.backward       the fourth mm of the backward
    convolution.0.bias  one of several kernels of an operator

Operators are counted as they are issued, views too, so that every tracer of the same model finds
the same names. `made_for` is what a plan keeps in `model`: a print of the parameters, and one of
the ops it names with the sizes they are given.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
import typing
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from foretell import spec
from foretell.cluster import Cluster, Level
from foretell.cluster import cluster as topology
from foretell.errors import InputError, unknown
from foretell.graph import Graph, Kind, Phase, WaitKind
from foretell.graph.graph import group_text, ranks_of
from foretell.io import parse_toml, read_json, read_text, write_text
from foretell.workload import Workload

Recompute = Literal["none", "selective", "full"]
Names = tuple[tuple[str, ...], ...]  # groups of names, written `a+b/c+d`
Numbers = tuple[int, ...]
# What other programs call the same things; each makes fields of a plan out of one number.
_ALSO = {"fsdp": "dp_shard", "dp_replicate": "dp_replicate", "dp_shard": "dp_shard"}
_ALSO |= {"mbs": "micro_batch", "gbs": "global_batch", "vpp": "chunks", "sequence_parallel": "sp"}
_ALSO |= {"stack": "framework"}
MOST_RANKS, MOST_SAMPLES = 1 << 24, 1 << 32  # of one plan


# What a segment may do its own way.
OWN = (
    "tp", "cp", "ep", "etp", "sp", "filter", "channel", "spatial", "zero", "shard", "recompute",
    "recompute_layers", "offload", "shares",
)  # fmt: skip
_LISTS = ("spatial", "shares")  # of these, fields that are several numbers
# Axes that run over the ranks of another: sequence over tensor, experts over data parallel.
_INSIDE = {"sp": "tp", "etp": "tp", "esp": "tp", "ep": "dp"}
ORDER = ("tp", "cp", "height", "width", "depth", "filter", "channel", "dp", "pp")


@dataclass(frozen=True, repr=False)
class Plan:
    """Degrees, batch, schedule, memory, communication, placement; all have a plain value."""

    dp: int = 1  # data-parallel ranks, those that share parameters among themselves included
    tp: int = 1  # tensor
    pp: int = 1  # pipeline stages (ranks in a row; each may have several chunks)
    cp: int = 1  # context: tokens of one sample split
    ep: int = 1  # experts split over data-parallel ranks, and over tensor ones where etp < tp
    etp: int = 0  # ranks of `tp` that split each expert; all of them where 0
    sp: bool = False  # sequence parallel: norms and residuals split over the ranks of `tp`
    filter: int = 1  # output channels
    channel: int = 1  # input channels
    spatial: Numbers = ()  # height, width, depth
    zero: int = 0  # 1 shards optimizer state over dp, 2 gradients too, 3 parameters too (FSDP)
    shard: int = 0  # dp ranks that share one copy (hybrid sharding); all where 0
    micro_batch: int = 0  # samples of one rank at a time; its whole share of the batch where 0
    global_batch: int = 0  # samples of one step; the workload's where 0
    schedule: str = "1f1b"  # gpipe, 1f1b, interleaved; or `actions`
    chunks: int = 1  # pieces of the model a stage has, taken in turns (interleaved)
    recompute: Recompute = "none"
    recompute_layers: int = 0  # blocks of each stage that are run again; all where 0
    offload: bool = False  # optimizer state and its update on the host
    precision: str = ""  # number formats (→ foretell.plan.framework); the framework's where empty
    dtype: str = ""  # format of matmuls; that of the precision or the workload where empty
    grad_dtype: str = ""  # in which gradients are added up and reduced; the precision's where empty
    compile: bool = False  # torch.compile: pointwise chains become single kernels
    optimizer: Literal["", "adam", "sgd", "momentum"] = ""  # as usual for the model where empty
    optimizer_kernels: Literal["", "foreach", "fused"] = ""  # foreach where empty
    bucket_mb: float = 25.0  # gradients sent together, at least; PyTorch DDP's default
    overlap: bool | None = None  # gradient reduction during the backward; the framework's way
    tp_overlap: bool | None = None  # TP collectives behind matmuls (async TP); the framework's way
    ep_overlap: bool | None = None  # all-to-alls of experts beside another micro-batch's compute
    ep_dispatch: Literal["", "rank", "node"] = ""  # a token sent once an expert, or once a node
    cuda_graph: Literal["", "layers", "iteration"] = ""  # replayed: all but experts, or all of it
    framework: str = ""  # what runs it (→ foretell.plan.framework); the default one where empty
    layers: Numbers = ()  # blocks of each stage where they are not even
    shares: Numbers = ()  # samples of each dp rank where they are not even
    placement: Numbers = ()  # cluster rank of each logical rank; in order where empty
    buckets: Names = ()  # parameters that are sent together, in this order
    parts: Numbers = ()  # messages of each bucket; one where empty
    update: Literal["together", "by-message"] = "together"  # or a bucket's as soon as it is there
    regions: Names = ()  # ops that are fused
    late: tuple[str, ...] = ()  # ops that run behind all others of the backward
    sync: Names = ()  # (parameter, all-reduce | ps:rank | factors | sharded) …
    actions: Names = ()  # per stage its order, such as F0 F1 B0
    stages: Names = ()  # stages placed freely: ranks, layers (→ foretell.plan.stage_placement)
    groups: Names = ()  # layers on ranks of their own: first, last, way, rank:samples …
    segments: Names = ()  # stages with meshes of their own (→ foretell.plan.plan)
    whatifs: tuple[str, ...] = ()  # further changes, as what-if specs
    model: str = ""  # fingerprint of the workload it was made for
    cluster: str = ""  # fingerprint of the machines it was made for

    @classmethod
    def parse(cls, text: str) -> Self:
        """The plan a text `field=value,field=value` stands for."""
        return cls(**cls._fields(text))

    def changed(self, text: str) -> Self:
        """The same plan with what a text says instead."""
        return self.but(**self._fields(text))

    @classmethod
    def _fields(cls, text: str) -> dict[str, Any]:
        given = spec.options(text, where=text)
        fields = {f.name for f in dataclasses.fields(cls)}
        for key in given:
            if key not in fields and key not in _ALSO:
                raise unknown("field of a plan", key, [*fields, *_ALSO])
        hints = field_types()
        return {
            key: _read(value, hints[key], f"`{key}` of a plan")
            for key, value in _renamed(given).items()
        }

    def __post_init__(self) -> None:
        for name, degree in self.degrees().items():
            if degree < 1:
                raise InputError(f"`{name}={degree}` in a plan", hint="a degree is 1 or more")
        if not 0 <= self.zero <= 3:
            raise InputError(f"`zero={self.zero}` in a plan", hint="it is 0, 1, 2 or 3")
        self._check_sizes()
        self._check_counts()
        if self.etp < 0 or self.tp % (self.etp or self.tp):
            raise InputError(f"`etp={self.etp}` in a plan", hint=f"it divides tp={self.tp}")
        if self.sp and self.tp == 1:
            object.__setattr__(self, "sp", False)  # nothing to split over

    def _check_sizes(self) -> None:
        """Refuse numbers no machine has: what counts ranks or samples one by one would not end."""
        degrees = self.degrees()
        name = max(degrees, key=lambda k: degrees[k])
        if degrees[name] > MOST_RANKS:
            raise InputError(
                f"`{name}={_short(degrees[name])}` in a plan", hint=f"{MOST_RANKS} at most"
            )
        for name in ("shard", "micro_batch", "global_batch", "chunks"):
            if getattr(self, name) > MOST_SAMPLES:
                raise InputError(
                    f"`{name}={_short(getattr(self, name))}` in a plan",
                    hint=f"it is {MOST_SAMPLES} at most",
                )
        for name in ("layers", "shares", "placement", "parts"):
            if not all(0 <= n <= MOST_SAMPLES for n in getattr(self, name)):
                raise InputError(f"a number of `{name}` in a plan is below 0 or too large")
        for name in ("stages", "groups", "segments"):
            if any(not row or max(map(len, row)) > 4096 for row in getattr(self, name)):
                raise InputError(f"`{name}` of a plan has a row that is empty or too long")
        if any(len(row) < 2 for row in self.segments):
            raise InputError(
                "a row of `segments` without ranks", hint="write BLOCKS+RANKS: 12+0-7+tp:4"
            )

    def _check_counts(self) -> None:
        for name in ("shard", "micro_batch", "global_batch", "recompute_layers"):
            if getattr(self, name) < 0:
                raise InputError(
                    f"`{name}={getattr(self, name)}` in a plan", hint="it is 1 or more; 0 is usual"
                )
        if not 0 < self.bucket_mb < math.inf:
            raise InputError(
                f"`bucket_mb={self.bucket_mb:g}` in a plan",
                hint="a message has some bytes: PyTorch's own has 25 MiB",
            )
        if min(self.shares, default=1) < 1:
            raise InputError(
                f"`shares={_written(self.shares)}` in a plan",
                hint="every rank has one sample or more; `placement` leaves ranks out",
            )

    def degrees(self) -> dict[str, int]:
        """Every factor of the number of ranks, by its name."""
        names = ("height", "width", "depth")
        spatial = dict(zip(names, self.spatial, strict=False))
        found = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "cp": self.cp}
        return found | {"filter": self.filter, "channel": self.channel} | spatial

    @property
    def ranks(self) -> int:
        """Ranks it needs: of stages or layers on ranks of their own, all up to the highest."""
        if self.stages:
            placed = [rank for texts in self.stages for rank in ranks_of(texts[0])]
            return 1 + max([len(self.actions) - 1, *placed])
        if self.segments:
            return 1 + max((r for row in self.segments for r in ranks_of(row[1])), default=0)
        if self.groups:
            named = (part.partition(":")[0] for row in self.groups for part in row[3:])
            return 1 + max((int(rank) for rank in named if rank.isdecimal()), default=0)
        return math.prod(self.degrees().values())

    @property
    def sharing(self) -> int:
        """Data-parallel ranks that share one copy of what is sharded."""
        return self.shard or self.dp

    def but(self, **changes: Any) -> Self:
        """The same plan with some fields changed."""
        if others := changes.keys() - self.__dict__.keys():
            raise TypeError(f"not fields of a plan: {sorted(others)}")
        made = object.__new__(type(self))  # `dataclasses.replace` goes through all 45 one by one
        made.__dict__.update(self.__dict__, **changes)
        made.__post_init__()
        return made

    def _repr_html_(self) -> str:
        """What a notebook shows: the fields that are not plain."""
        from foretell.graph.show import headed, html_table

        return headed(f"Plan for {self.ranks} ranks", html_table(("field", "value"), self._set()))

    def _set(self) -> list[tuple[str, str]]:
        """The fields that are not plain, and their values as text."""
        plain = type(self)()
        pairs = (
            (f.name, getattr(self, f.name), getattr(plain, f.name))
            for f in dataclasses.fields(self)
        )
        return [(name, _written(value)) for name, value, usual in pairs if value != usual]

    def __str__(self) -> str:
        return ",".join("=".join(pair) for pair in self._set()) or "dp=1"

    def __repr__(self) -> str:
        return f"Plan.parse({str(self)!r})"


def _renamed(given: dict[str, str]) -> dict[str, str]:
    """Fields by their own names; `dp_replicate` and `dp_shard` together make `dp`."""
    out = {_ALSO.get(key, key): value for key, value in given.items()}
    copies, shard = out.pop("dp_replicate", ""), out.pop("dp_shard", "")
    if not copies and not shard:
        return out
    if "dp" in out:
        raise InputError(
            f"`dp={out['dp']}` beside dp_replicate or dp_shard",
            hint="dp is their product: give the one or the other",
        )
    many, parts = (_read(v or "1", int, "`dp_shard` of a plan") for v in (copies, shard))
    out["dp"] = str(many * parts)
    if parts > 1:
        out.setdefault("zero", "3")
        if many > 1:
            out.setdefault("shard", str(parts))
    return out


@cache
def field_types() -> dict[str, Any]:
    """The type of every field of a plan."""
    return typing.get_type_hints(Plan)


def _read(text: str, kind: Any, where: str) -> Any:
    if kind == Names:
        rows = text.split("/") if text else []  # a rank without actions has an empty row
        return tuple(tuple(_plain(item) for item in row.split("+") if item) for row in rows)
    return spec.read(text, kind, where)


def _written(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "/".join("+".join(_coded(item) for item in group) for group in value)
    return spec.write(value)


def _coded(text: str) -> str:
    out = spec.write(text)
    return out.replace("+", "%2B").replace("/", "%2F")


def _short(value: int) -> str:
    """A number that may have thousands of digits, in few letters."""
    return str(value) if value < 10**20 else "a number of more than 20 digits"


def _plain(text: str) -> str:
    found: str = spec.read(text, str, "a name in a plan")
    return found


_PLAIN = Plan()


@dataclass(frozen=True)
class Segment:
    """One stage: the blocks it has, its ranks, and the plan that it alone follows.

    The plan's degrees are the segment's; stages, micro-batches and schedule are the whole plan's.
    """

    blocks: int
    ranks: tuple[int, ...]
    plan: Plan

    def text(self, whole: Plan) -> tuple[str, ...]:
        """The segment as a row of a plan."""
        own = [
            f"{name}:{spec.write(getattr(self.plan, name)).replace('+', 'x')}"
            for name in OWN
            if getattr(self.plan, name) != getattr(whole, name)
        ]
        return (str(self.blocks), group_text(self.ranks), *own)


def segments(plan: Plan, workload: Workload) -> tuple[Segment, ...]:
    """The segments that the rows of a plan stand for; an error where a row cannot be."""
    found = segments_of(plan, workload.batch)
    blocks = [one.blocks for one in found]
    if sum(blocks) != workload.num_blocks:
        raise InputError(
            f"segments of {'+'.join(map(str, blocks))} blocks; `{workload.name}` has "
            f"{workload.num_blocks}",
            hint="together they are the model",
        )
    return found


def segments_of(plan: Plan, batch: int) -> tuple[Segment, ...]:
    """The segments of any model; `batch`: samples a replica of the first, by default."""
    rows = [_row(row, plan) for row in plan.segments]
    blocks = tuple(count for count, _, _ in rows)
    if min(blocks) < 1:
        raise InputError(
            f"segments of {'+'.join(map(str, blocks))} blocks", hint="every segment has one or more"
        )
    _check_ranks([ranks for _, ranks, _ in rows])
    whole = plan.global_batch or batch * _replicas(rows[0][1], rows[0][2])
    each = plan.micro_batch or whole
    if whole % each:
        raise InputError(
            f"global_batch={whole} is no multiple of micro_batch={each}",
            hint="with segments, micro_batch counts the samples of all replicas together",
        )
    common = plan.but(
        segments=(), pp=len(rows), layers=blocks, global_batch=whole, cluster="", placement=()
    )
    return tuple(
        Segment(count, ranks, _segment_plan(common, ranks, own, each)) for count, ranks, own in rows
    )


def blocks_of(plan: Plan, workload: Workload) -> tuple[int, ...]:
    """Blocks of each stage.

    Where they are no multiple of the stages, what stands before and behind them counts too, as
    Megatron and torchtitan do: a block each, and what is between blocks and head by its flops.
    """
    if plan.layers:
        return plan.layers
    each, rest = divmod(workload.num_blocks, plan.pp)
    if not rest or workload.tokens <= 1:
        return tuple(each + (stage < rest) for stage in range(plan.pp))
    return _shared_out(workload.num_blocks, plan.pp, *workload.ends)


@cache
def _shared_out(blocks: int, stages: int, before: float, behind: float) -> tuple[int, ...]:
    """A block each, then one after another to the stage that has least, the earliest of several."""
    found = [1] * stages
    busy = [1.0 + before * (at == 0) + behind * (at == stages - 1) for at in range(stages)]
    for _ in range(blocks - stages):
        least = min(range(stages), key=lambda at: busy[at])
        found[least], busy[least] = found[least] + 1, busy[least] + 1
    return tuple(found)


def _row(row: Sequence[str], plan: Plan) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """Blocks, ranks and own fields of one row."""
    where = f"the row `{'+'.join(row)}` of segments"
    if not row[0].isdecimal():
        raise InputError(f"{where} begins with no number", hint="write BLOCKS+RANKS: 12+0-7+tp:4")
    own: dict[str, Any] = {name: getattr(plan, name) for name in OWN}
    for text in row[2:]:
        name, _, value = text.partition(":")
        if name not in OWN:
            raise unknown(f"field in {where}", name, OWN)
        value = value.replace("x", "+") if name in _LISTS else value
        own[name] = spec.read(value, field_types()[name], where)
    return int(row[0]), ranks_of(row[1]), own


def _check_ranks(found: Sequence[tuple[int, ...]]) -> None:
    every = [rank for ranks in found for rank in ranks]
    if not all(found) or len(set(every)) < len(every):
        raise InputError(
            "a segment without ranks, or a rank in two segments", hint="each rank has one segment"
        )


def _replicas(ranks: Sequence[int], own: dict[str, Any]) -> int:
    return max(len(ranks) // max(_inner(own), 1), 1)


def _inner(own: dict[str, Any]) -> int:
    """Ranks of one replica of a segment."""
    degrees = (own[name] for name in ("tp", "cp", "filter", "channel"))
    return math.prod((*degrees, *own["spatial"]))


def _segment_plan(common: Plan, ranks: tuple[int, ...], own: dict[str, Any], each: int) -> Plan:
    """The plan of one segment."""
    inner = _inner(own)
    dp = len(ranks) // inner if inner else 0
    if dp < 1 or dp * inner != len(ranks):
        raise InputError(
            f"replicas of {inner} ranks on the {len(ranks)} ranks of a segment",
            hint="tp × cp × filter × channel × spatial divides the number of ranks",
        )
    turns = common.global_batch // each
    if own["shares"]:
        _check_shares(common, own, dp, turns)
    if len(set(own["shares"])) > 1:
        return common.but(dp=dp, micro_batch=max(own["shares"]) // turns, **own)
    if each % dp:
        raise InputError(
            f"micro-batches of {each} samples for {dp} replicas of a segment",
            hint=f"a multiple of {dp}, or `shares` for replicas that have unlike numbers of them",
        )
    return common.but(**own | {"dp": dp, "micro_batch": each // dp, "shares": ()})


def _check_shares(common: Plan, own: dict[str, Any], dp: int, turns: int) -> None:
    """Samples of a segment's replicas: so many of every micro-batch, all of the step together."""
    shares, whole = own["shares"], common.global_batch
    if len(shares) != dp or sum(shares) != whole or any(n % turns for n in shares):
        raise InputError(
            f"shares of {_written(shares)} samples in a segment of {dp} replicas",
            hint=f"{dp} multiples of {turns} (micro-batches) that add up to global_batch={whole}",
        )
    inside = [n for n in ("ep", "filter", "channel") if own[n] > 1] + ["spatial"] * bool(
        own["spatial"]
    )
    if inside:
        raise InputError(
            f"`{inside[0]}` beside uneven shares of a segment",
            hint="its replicas exchange as many samples as the others: leave one of them out",
        )


def micro_samples(plan: Plan) -> int:
    """Samples of one micro-batch of all replicas together, of a segment's own plan."""
    if not plan.shares:
        return plan.micro_batch * plan.dp
    return sum(plan.shares) * plan.micro_batch // max(plan.shares)


def as_degrees(plan: Plan, found: Sequence[Segment], cluster: Cluster) -> Plan | None:
    """The same plan in degrees where all segments are alike; None where they are not.

    There is one way to write a plan down, and so one price for it.
    """
    first = found[0].plan
    if any(one.plan != first or len(one.ranks) != len(found[0].ranks) for one in found):
        return None
    ranks = tuple(rank for one in found for rank in one.ranks)
    in_order = ranks == tuple(range(cluster.size))
    return first.but(placement=() if in_order else ranks, cluster=plan.cluster)


def plan_of_segments(plan: Plan, found: Sequence[Segment]) -> Plan:
    """A plan whose stages are these segments; `plan` says what they have in common."""
    each = {micro_samples(one.plan) for one in found}
    if len(each) > 1:
        raise InputError(
            f"segments with micro-batches of {sorted(each)} samples",
            hint="all segments work on the same micro-batches",
        )
    shared = {name: getattr(_PLAIN, name) for name in (*OWN, "dp", "pp", "layers", "placement")}
    common = plan.but(**shared, micro_batch=each.pop(), segments=())
    return common.but(segments=tuple(one.text(common) for one in found))


def stride(plan: Plan, axis: str) -> int:
    """How far apart in rank two neighbours of an axis are."""
    if axis == "ep" and expert_ranks(plan) > 1:
        return plan.etp
    degrees, out = plan.degrees(), 1
    axis = _INSIDE.get(axis, axis)
    for inner in ORDER:
        if inner == axis:
            return out
        out *= degrees.get(inner, 1)
    return out


def expert_ranks(plan: Plan) -> int:
    """Tensor-parallel ranks that have experts of their own."""
    return plan.tp // (plan.etp or plan.tp)


@lru_cache(maxsize=4096)
def levels(cluster: Cluster, size: int, stride: int, first: int = 0) -> tuple[Level, ...]:
    """What `size` ranks from `first` on, `stride` apart, see while their neighbours communicate."""
    group = [first + i * stride for i in range(size)]
    node = int((cluster.nodes == cluster.nodes[first]).sum())
    beside = range(1, min(stride, node, cluster.size - group[-1]))
    return cluster.levels(group, [[r + k for r in group] for k in beside])


@lru_cache(maxsize=4096)
def hop_levels(cluster: Cluster, stages: int, stride: int) -> dict[tuple[Level, ...], int]:
    """What messages from each stage to the next see, and how many of the hops see the same."""
    known: dict[object, tuple[Level, ...]] = {}
    found: dict[tuple[Level, ...], int] = {}
    node = int((cluster.nodes == cluster.nodes[0]).sum())
    for first in range(0, (stages - 1) * stride, stride):
        mine = range(first, first + min(stride, node))
        nodes = cluster.nodes[[*mine, *(r + stride for r in mine)]]
        pairs = [topology.pair_key(cluster, r, r + stride) for r in mine]
        alike = (nodes - nodes[0]).tobytes(), *pairs
        if alike not in known:
            known[alike] = levels(cluster, 2, stride, first)
        found[known[alike]] = found.get(known[alike], 0) + 1
    return found


FORWARD, BACKWARD = (Phase.FORWARD, Phase.LOSS), (Phase.BACKWARD,)
COPY = "*"  # behind an op's name: recomputed in this region, and where it was too
_BLOCK = 512  # bytes: what a GPU's allocator rounds to, and so the buffers of a capture


PREDICTED = "predicted"  # the table of what was predicted
FILES = (".plan", ".json", ".toml")
_MADE = "`foretell plan … -o FILE` writes one"
_SHOWN = 60  # letters of a value that is wrong


def op_names(graph: Graph) -> dict[int, str]:
    """The name of each kernel of forward, loss and backward, by its task."""
    mine = np.isin(graph.phase, (*FORWARD, *BACKWARD))
    issued = _issued(graph)
    calls = [t for t in np.flatnonzero(mine).tolist() if _is_call(graph, t, issued)]
    count: Counter[str] = Counter()
    named: dict[int, str] = {}
    for task in calls:
        named[task] = numbered(_op(graph, task), graph.phase[task] in BACKWARD, count)
    kernels = np.flatnonzero(mine & (graph.kind == Kind.KERNEL)).tolist()
    return {t: named[issued.get(t, t)] + _part(graph, t) for t in kernels}


def numbered(op: str, is_backward: bool, count: Counter[str]) -> str:
    """The name of the next operator of its sort; `count` is of those before it."""
    side = ".backward" if is_backward else ""
    plain = op.rstrip("_")  # in place or not, it is the same op
    count[plain + side] += 1
    return f"{plain}.{count[plain + side] - 1}{side}"


def given(graph: Graph, task: int) -> str:
    """The sizes of what an op is given: `32x256+256`."""
    text = graph.names[int(graph.shape[task])]
    return next((part[3:] for part in text.split(",") if part.startswith("in=")), "")


def parameter_print(sizes: Mapping[str, float]) -> str:
    """The same for two models exactly when their trained parameters are: names and bytes."""
    rows = [f"{name} {-(-int(size) // _BLOCK) * _BLOCK}" for name, size in sorted(sizes.items())]
    return _print(rows)


def made_for(parameters: str, ops: Iterable[tuple[str, str]]) -> str:
    """What a plan keeps of the step it was made for: its parameters, and (name, given) of ops."""
    return f"{parameters}.{_print(sorted(f'{name} {sizes}' for name, sizes in ops))}"


def named_ops(regions: Iterable[Iterable[str]], late: Iterable[str]) -> list[str]:
    """Every op that a plan speaks of, once."""
    inside = (name.removesuffix(COPY) for region in regions for name in region)
    return list(dict.fromkeys([*inside, *late]))


def _print(rows: list[str]) -> str:
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def _issued(graph: Graph) -> dict[int, int]:
    """For each kernel the call that issued it."""
    edges = graph.edges
    mine = edges.kinds == WaitKind.LAUNCH
    pairs = zip(edges.waiting[mine].tolist(), edges.after[mine].tolist(), strict=True)
    return dict(pairs)


def _is_call(graph: Graph, task: int, issued: Mapping[int, int]) -> bool:
    """Whether a task issues an operator: a call of the host, or a kernel without an operator."""
    return bool(graph.kind[task] == Kind.HOST) or (
        bool(graph.kind[task] == Kind.KERNEL) and task not in issued
    )


def _op(graph: Graph, task: int) -> str:
    return str(graph.names[int(graph.op[task])])


def _part(graph: Graph, task: int) -> str:
    text = graph.names[int(graph.shape[task])]
    word = next((part[5:] for part in text.split(",") if part.startswith("part=")), "")
    return f".{word}" if word else ""


def save(plan: Plan, path: Path, predicted: Mapping[str, Any] | None = None) -> None:
    """Write a plan and what was predicted of it; the ending of the name says how."""
    fields = as_fields(plan)
    if path.suffix == ".toml":
        text = _toml(fields) + (f"\n[{PREDICTED}]\n{_toml(predicted)}" if predicted else "")
    else:
        more = {PREDICTED: dict(predicted)} if predicted else {}
        text = json.dumps(fields | more, indent=1) + "\n"
    write_text(path, text)


def load(path: Path) -> Plan:
    """Read a plan back."""
    return of_fields(_fields(path), str(path))


def predicted(path: Path) -> dict[str, Any]:
    """The prediction stored in a plan's file; empty where there is none."""
    fields = _fields(path)
    found = fields.get(PREDICTED) if isinstance(fields, dict) else None
    return found if isinstance(found, dict) else {}


def _fields(path: Path) -> Any:
    if path.suffix != ".toml":
        return read_json(path, what="plan", hint=_MADE)
    try:
        return parse_toml(read_text(path, what="plan"), f"`{path}`")
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"`{path}` is no plan: {error}", hint=_MADE) from None


def read(text: str) -> Plan:
    """A plan from its text, from a file's name, or from a file with some fields changed.

    `best.plan:dp=24,global_batch=48` prices a plan that was found for other devices.
    """
    if text.endswith(FILES):
        return load(Path(text))
    name, _, changes = text.partition(":")
    if not name.endswith(FILES):
        return Plan.parse(text)
    return load(Path(name)).changed(changes)


def as_fields(plan: Plan) -> dict[str, Any]:
    """The fields that are not plain, as JSON has them."""
    plain = Plan()
    return {
        f.name: _list(getattr(plan, f.name))
        for f in dataclasses.fields(plan)
        if getattr(plan, f.name) != getattr(plain, f.name)
    }


def of_fields(fields: Any, where: str) -> Plan:
    """A plan from the fields of a file."""
    known = field_types()
    if not isinstance(fields, dict):
        raise InputError(f"`{where}` is no plan", hint="it is one table of fields")
    fields = {key: value for key, value in fields.items() if key != PREDICTED}
    for key, value in fields.items():
        if key not in known:
            raise unknown(f"field of a plan in `{where}`", key, known)
        if not _fits(value, known[key]):
            raise InputError(
                f"`{key}` in `{where}` is {_short_name(value)}, which it cannot be", hint=_MADE
            )
    return Plan(**{key: _tuple(value) for key, value in fields.items()})


def _fits(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        return isinstance(value, list) and all(_fits(item, inner) for item in value)
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    kinds = typing.get_args(kind) or (kind,)
    is_whole_float = float in kinds and type(value) is int
    return type(value) in kinds or is_whole_float


def _short_name(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _list(value: Any) -> Any:
    return [_list(item) for item in value] if isinstance(value, tuple) else value


def _tuple(value: Any) -> Any:
    return tuple(_tuple(item) for item in value) if isinstance(value, list) else value


def _toml(fields: Mapping[str, Any]) -> str:
    """JSON's numbers, texts, lists and booleans are TOML's too."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())
