"""A layout as plain data: who does which part of a step, in which order, and what is kept.

    Plan.parse("dp=4,tp=8,pp=2,micro_batch=1,global_batch=512,recompute=full,schedule=1f1b")

`str()` gives such a text back, `foretell.plan.file` reads and writes it as JSON or TOML. Written by
hand or found by a planner, a plan lowers and deploys the same. Words are those of PyTorch.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Self

from foretell import spec
from foretell.errors import InputError, unknown
from foretell.graph.groups import ranks_of

Recompute = Literal["none", "selective", "full"]
Names = tuple[tuple[str, ...], ...]  # groups of names, written `a+b/c+d`
Numbers = tuple[int, ...]

# What other programs call the same things; each makes fields of a plan out of one number.
_ALSO = {"fsdp": "dp_shard", "dp_replicate": "dp_replicate", "dp_shard": "dp_shard"}
_ALSO |= {"mbs": "micro_batch", "gbs": "global_batch", "vpp": "chunks", "sequence_parallel": "sp"}
_ALSO |= {"stack": "framework"}


MOST_RANKS, MOST_SAMPLES = 1 << 24, 1 << 32  # of one plan


@dataclass(frozen=True)
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
    precision: str = ""  # number formats (→ foretell.plan.precision); the framework's where empty
    dtype: str = ""  # format of matmuls; that of the precision or the workload where empty
    grad_dtype: str = ""  # in which gradients are added up and reduced; the precision's where empty
    compile: bool = False  # torch.compile: pointwise chains become single kernels
    optimizer: Literal["", "adam", "sgd", "momentum"] = ""  # as usual for the model where empty
    optimizer_kernels: Literal["", "foreach", "fused"] = ""  # foreach where empty
    bucket_mb: float = 25.0  # gradients sent together, at least; PyTorch DDP's default
    overlap: bool | None = None  # gradient reduction during the backward; the framework's way
    tp_overlap: bool | None = None  # TP collectives behind matmuls (async TP); the framework's way
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
    segments: Names = ()  # stages with meshes of their own (→ foretell.plan.segments)
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

        plain = type(self)()
        rows = [
            (f.name, _written(getattr(self, f.name)))
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(plain, f.name)
        ]
        return headed(f"Plan for {self.ranks} ranks", html_table(("field", "value"), rows))

    def __str__(self) -> str:
        plain = type(self)()
        changed = [
            f"{f.name}={_written(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != getattr(plain, f.name)
        ]
        return ",".join(changed) or "dp=1"


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
        groups = [part for part in text.split("/") if part]
        return tuple(tuple(_plain(item) for item in group.split("+")) for group in groups)
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
