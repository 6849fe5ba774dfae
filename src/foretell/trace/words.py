"""Meaning of names in a trace: calls, annotations, operators, kernels of collectives.

Names are looked at once each, never once an event. CUDA and HIP use the same words behind their
prefixes, so one table serves both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum, IntFlag
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from foretell.graph import Dtype, Edges, Graph, Kind, LaneKind, Lanes, Names, assemble
from foretell.graph.graph import Array, word_of
from foretell.operators import FORMATS, SIZES, having


class CallEffect(IntEnum):
    """Effect of a runtime call on the order of work."""

    NOTHING = 0
    DRAIN_DEVICE = 1
    DRAIN_STREAM = 2
    DRAIN_EVENT = 3
    RECORD = 4  # puts an event on a stream
    WAIT = 5  # lets a stream wait for an event
    FREE = 6  # gives memory back, which waits for the device


class RangeKind(IntFlag):
    """Phase or role that a named range or operator gives to everything inside it."""

    NOTHING = 0
    STEP = 1
    UPDATE = 2
    LOAD = 4
    BACKWARD = 8
    LOSS = 16
    LAYER = 32
    UNIT = 64  # one operator call: what is inside belongs to it


_CALL = re.compile(r"^(?:cuda|hip|cuCtx|cu)")
_DOES = {
    "DeviceSynchronize": CallEffect.DRAIN_DEVICE,
    "ThreadSynchronize": CallEffect.DRAIN_DEVICE,
    "Synchronize": CallEffect.DRAIN_DEVICE,  # cuCtxSynchronize
    "StreamSynchronize": CallEffect.DRAIN_STREAM,
    "EventSynchronize": CallEffect.DRAIN_EVENT,
    "EventRecord": CallEffect.RECORD,
    "EventRecordWithFlags": CallEffect.RECORD,
    "StreamWaitEvent": CallEffect.WAIT,
    "Free": CallEffect.FREE,
    "FreeHost": CallEffect.FREE,
    "HostFree": CallEffect.FREE,
    "HostUnregister": CallEffect.FREE,
    "MemFree": CallEffect.FREE,
}

_STEP = re.compile(r"ProfilerStep#(\d{1,15})")
_UPDATE = re.compile(r"Optimizer\.(step|zero_grad)|##\s*(optimizer|zero_grad)", re.IGNORECASE)
_BACKWARD = re.compile(r"autograd::engine::evaluate_function|##\s*backward\b")
_LOSS = re.compile(
    r"aten::(cross_entropy_loss|nll_loss\w*|mse_loss|l1_loss|smooth_l1_loss|huber_loss|kl_div"
    r"|binary_cross_entropy\w*|ctc_loss|cosine_embedding_loss|soft_margin_loss)$"
)
_WRAPPERS = ("autograd::engine::evaluate_function: ", "aten::", "torch::autograd::")
_INDUCTOR = re.compile(
    r"^triton_(poi|red|per|tem|for|mm)_|^(Torch-Compiled|CompiledFunction|CompiledFx)"
)
GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch")
MEASURED = "foretell"  # the key of a trace under which `foretell profile` puts what it timed
LAYER_NOTE = "layer:"  # a record_function of that name marks a module: `layer:features.0`

# One word for what several backends call differently.
_ALIASES: dict[str, str] = having("alias")

_NCCL = re.compile(
    r"(?:nccl|rccl)\w*?(AllReduce|ReduceScatter|AllGather|Broadcast|Reduce|SendRecv)"
)
_IS_NCCL = re.compile(r"^(?:void )?(?:nccl|rccl|msccl)", re.IGNORECASE)
# Libraries with kernels of their own: DeepEP's dispatch and combine of expert parallelism, NVSHMEM,
# MSCCL++, the custom all-reduce of serving engines and TensorRT-LLM, symmetric memory of PyTorch.
_OWN_COMM = (
    (re.compile(r"deep_ep::\w+::(?:dispatch|combine|notify_dispatch|cached_notify)"), "all_to_all"),
    (re.compile(r"(?:nvshmem|rocshmem|mscclpp).*?(?:all_?to_?all|put|get)", re.I), "all_to_all"),
    (re.compile(r"nvshmem|rocshmem|mscclpp", re.I), "all_reduce"),
    (re.compile(r"cross_device_reduce|oneShotAllReduce|twoShotAllReduce|one_shot_all_reduce|"
                r"two_shot_all_reduce|multimem_all_reduce"), "all_reduce"),
    (re.compile(r"multimem_all_gather"), "all_gather"),
)  # fmt: skip
# The same libraries by the names that people know them by; what begins with `nccl` has none here.
_LIBRARIES = (
    ("DeepEP", re.compile(r"deep_ep::")),
    ("NVSHMEM", re.compile(r"nvshmem", re.I)),
    ("rocSHMEM", re.compile(r"rocshmem", re.I)),
    ("MSCCL", re.compile(r"msccl", re.I)),
    ("RCCL", re.compile(r"rccl", re.I)),
    ("a custom all-reduce", _OWN_COMM[3][0]),
    ("symmetric memory", re.compile(r"multimem_")),
)
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "all_to_all",  # the annotation around it says where that is not so
    "send": "send",
    "recv": "recv",
}
_COMM_NOTE = re.compile(r"^(?:nccl|gloo|c10d|ucc|rccl):+_?(\w+)")

_DTYPES = {f.traced: Dtype[f.word.upper()] for f in FORMATS if f.word.upper() in Dtype.__members__}
_ELEMENTS = {f.scalar: f.bytes for f in FORMATS}  # as collectives name their element type


class Texts:
    """Strings met so far, each with its number; 0 is the empty one."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {"": 0}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    def table(self, texts: Iterable[str]) -> Array:
        """The numbers of several, new ones included."""
        return np.array([self.number(t) for t in texts], np.int64)


def graph_of_rows(
    rows: Sequence[dict[str, Any]],
    waits: Edges,
    texts: Texts,
    lanes: dict[tuple[str, LaneKind], int],
    *,
    rank: int,
    where: str,
    ordered: bool,
) -> Graph:
    """The graph of one rank whose tasks were read one by one, and its lanes as they were met."""
    columns = {k: np.array([row[k] for row in rows]) for k in rows[0]}
    columns["rank"] = np.full(len(rows), rank)
    names = texts.table(name for name, _ in lanes)
    kinds, many = np.array([kind for _, kind in lanes]), len(lanes)
    return assemble(
        len(rows), columns, waits,
        names=Names(texts.numbers),
        lanes=Lanes(np.full(many, rank), names, kinds, np.full(many, ordered)),
        facts={"source": os.path.basename(where)},
    )  # fmt: skip


def by_name(texts: Sequence[str], name: Array, meaning: Callable[[str], int]) -> Array:
    """A code for every event from its name, looked up once a name."""
    table = np.zeros(len(texts), np.int64)
    for k in np.flatnonzero(np.bincount(name, minlength=len(texts))).tolist():
        table[k] = meaning(texts[k])
    found: Array = table[name]
    return found


@lru_cache(4096)
def call_effect(call: str) -> CallEffect:
    """The effect of a runtime call."""
    return _DOES.get(_CALL.sub("", call).removesuffix("_v2"), CallEffect.NOTHING)


@lru_cache(65536)
def range_kind(note: str) -> RangeKind:
    """The range kind of an annotation, by its name."""
    if _STEP.match(note):
        return RangeKind.STEP
    if note.startswith("enumerate(DataLoader)"):
        return RangeKind.LOAD | RangeKind.UNIT
    if note.startswith(LAYER_NOTE):
        return RangeKind.LAYER
    return RangeKind.UPDATE if _UPDATE.match(note) else RangeKind.NOTHING


@lru_cache(65536)
def op_kind(op: str) -> RangeKind:
    """The range kind of an operator, by its name."""
    if _BACKWARD.match(op):
        return RangeKind.BACKWARD | RangeKind.UNIT
    return RangeKind.LOSS | RangeKind.UNIT if _LOSS.match(op) else RangeKind.UNIT


def step_number(note: str) -> int:
    """The number in `ProfilerStep#12`."""
    found = _STEP.match(note)
    return int(found[1]) if found else -1


@lru_cache(65536)
def plain(op: str) -> str:
    """An operator's name without what wraps it: `aten::addmm` → `addmm`."""
    for wrapper in _WRAPPERS:
        op = op.removeprefix(wrapper)
    return op


@lru_cache(65536)
def canonical(op: str) -> str:
    """The one word for an operator, whatever backend runs it."""
    name = plain(op)
    return _ALIASES.get(name, name)


@lru_cache(1 << 14)  # ranks of a job run kernels of the same names
def is_compiled(graph: Graph) -> bool:
    """Whether Inductor made kernels of this step: its names say so, of kernels and of regions."""
    used = {*graph.name.tolist(), *graph.op.tolist()}
    return any(_INDUCTOR.search(graph.names[k]) for k in used if k >= 0)


def is_collective(kernel: str) -> bool:
    """Whether a kernel moves data between ranks."""
    return _IS_NCCL.match(kernel) is not None or bool(_own_comm(kernel))


def _own_comm(kernel: str) -> str:
    """The collective a kernel of another library does; empty where it does none."""
    return next((word for pattern, word in _OWN_COMM if pattern.search(kernel)), "")


def library(kernel: str) -> str:
    """The communication library that a kernel is of, where it is not NCCL; empty else."""
    return next((name for name, pattern in _LIBRARIES if pattern.search(kernel)), "")


def collective(kernel: str, text: str) -> tuple[Kind, str]:
    """Kind and op of a communication kernel, from its metadata or else from its name."""
    note = _COMM_NOTE.match(text)
    words = (note[1] if note else text).lower()
    known = _collective_word(words)
    if not known:
        found = _NCCL.search(kernel)
        known = _COLLECTIVES[found[1].lower()] if found else _own_comm(kernel) or "all_reduce"
    return (Kind.SEND, known) if known in ("send", "recv") else (Kind.COLLECTIVE, known)


def _collective_word(words: str) -> str:
    squeezed = words.replace("_", "").replace("base", "").replace("coalesced", "")
    for key, word in _COLLECTIVES.items():
        if key != "sendrecv" and squeezed.startswith(key):
            return word
    return ""


def element_bytes(element: str) -> int:
    """Bytes of one element of a collective's type."""
    return _ELEMENTS.get(element, 4)


class Shape:
    """The inputs of an operator: their sizes, types and plain values."""

    def __init__(self, raw: tuple[bytes, bytes, bytes]) -> None:
        self.dims, self.types, self.values = (_list(part) for part in raw)

    @property
    def dtype(self) -> Dtype:
        """The first floating-point type among the inputs, else the first type of all."""
        known = [_DTYPES[t] for t in self.types if isinstance(t, str) and t in _DTYPES]
        floats = [d for d in known if d <= Dtype.FP8]
        return (floats or known or [Dtype.NONE])[0]

    @property
    def bytes(self) -> float:
        """Bytes of the first input."""
        dims = self.dims[0] if self.dims else []
        if not isinstance(dims, list) or not all(isinstance(d, int) for d in dims):
            return 0.0
        return float(np.prod(dims, dtype=np.float64)) * SIZES.get(word_of(Dtype, self.dtype), 4)

    def text(self) -> str:
        """`in=64x3x7x7+64,types=float+float,args=-+2x2`: inputs by `+`, dims by `x`, none `-`."""
        parts = [f"in={'+'.join(map(_dims_text, self.dims))}"]
        if any(self.types):
            parts.append(f"types={'+'.join(_plain_text(t) for t in self.types)}")
        if any(self.values):
            parts.append(f"args={'+'.join(_plain_text(v) for v in self.values)}")
        return ",".join(parts)


def _list(raw: bytes) -> list[Any]:
    try:
        found = msgspec.json.decode(raw) if raw else []
    except (msgspec.DecodeError, UnicodeDecodeError):  # arguments are kept without being looked at
        return []
    return found if isinstance(found, list) else []


def _dims_text(dims: Any) -> str:
    if not isinstance(dims, list):
        return "-"
    if any(isinstance(d, list) for d in dims):  # a list of tensors
        return "|".join(map(_dims_text, dims))
    return "x".join(map(str, dims)) or "-"


def _plain_text(value: Any) -> str:
    text = str(value).strip("[]")
    return text.replace(", ", "x").replace(",", "x").replace("+", "") or "-"
