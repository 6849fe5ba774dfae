"""The columns of a graph, and the words that their codes stand for.

A graph stores only the columns that differ from their default somewhere; the others cost nothing.
Text columns (op, name, layer, shape, group) hold indices into the graph's `Names`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import GraphError, InputError, unknown

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
Tasks = npt.NDArray[Any] | Sequence[int] | int  # what a verb takes
NONE = -1  # no task, no lane


class Kind(IntEnum):
    """The kind of work of a task."""

    HOST = 0  # a call on a CPU thread: an operator, a launch, Python
    KERNEL = 1  # work on a device
    COPY = 2  # memory moved inside a rank: host to device, device to host, on the device
    COLLECTIVE = 3  # all ranks of a group together
    SEND = 4  # point to point, both ends
    LOAD = 5  # reading and preparing data
    SYNC = 6  # waits for others and does nothing itself


class Phase(IntEnum):
    """Which part of a training step a task belongs to."""

    NONE = 0
    LOAD = 1
    FORWARD = 2
    LOSS = 3
    BACKWARD = 4
    COMMUNICATE = 5
    UPDATE = 6


class Dtype(IntEnum):
    """The number format a task computes in."""

    NONE = 0
    FP64 = 1
    FP32 = 2
    TF32 = 3
    FP16 = 4
    BF16 = 5
    FP8 = 6
    INT64 = 7
    INT32 = 8
    INT8 = 9
    BOOL = 10
    COMPLEX64 = 11


class Source(IntEnum):
    """Where the price of a task comes from, most trusted first."""

    NONE = 0
    MEASURED = 1
    LEARNED = 2
    FORMULA = 3
    GUESSED = 4


class LaneKind(IntEnum):
    """The resource a lane stands for."""

    OTHER = 0
    HOST = 1  # a CPU thread
    COMPUTE = 2  # a stream of kernels
    COPY = 3  # a copy engine or stream
    COMM = 4  # a communication stream or channel
    LOADER = 5  # a data-loading worker


class BufferKind(IntEnum):
    """The purpose of a buffer."""

    OTHER = 0
    PARAMETER = 1
    GRADIENT = 2
    OPTIMIZER = 3
    ACTIVATION = 4
    INPUT = 5
    WORKSPACE = 6
    BUCKET = 7


class WaitKind(IntEnum):
    """Why one task waits for another."""

    DATA = 0  # it uses what the other made
    LAUNCH = 1  # a host call starts device work
    SYNC = 2  # a host call waits for device work
    EVENT = 3  # one stream waits for an event of another
    THREAD = 4  # one CPU thread hands over to another
    CONTROL = 5  # an order that was decided


# What people write for each collective and point-to-point op, here once for every room.
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")


@dataclass(frozen=True)
class Column:
    """One column: its type, its default, and its meaning."""

    dtype: Any
    default: float
    means: str
    words: type[IntEnum] | None = None  # codes that print as words
    is_text: bool = False  # indices into Names
    low: float | None = None  # smallest value allowed


def _count(default: int, means: str, low: float | None = None) -> Column:
    return Column(np.int32, default, means, low=low)


def _number(means: str) -> Column:
    return Column(np.float64, 0.0, means, low=0.0)


def _text(means: str) -> Column:
    return Column(np.int32, 0, means, is_text=True, low=0)


def _code(words: type[IntEnum], means: str) -> Column:
    return Column(np.uint8, 0, means, words=words, low=0)


COLUMNS: Mapping[str, Column] = MappingProxyType(
    {
        "kind": _code(Kind, "what sort of work"),
        "op": _text("the kind of work: gemm, conv, all_reduce, cudaLaunchKernel"),
        "name": _text("what a person calls this task"),
        "rank": _count(0, "the process it belongs to", low=0),
        "lane": _count(NONE, "what it occupies; none for a pure wait", low=NONE),
        "seconds": _number("how long it runs when nothing disturbs it"),
        "gap": _number("how long its lanes stay taken after it has ended"),
        "flops": _number("floating-point operations"),
        "bytes": _number("bytes moved to and from device memory"),
        "comm_bytes": _number("bytes of the tensor communicated"),
        "layer": _text("the module it comes from"),
        "phase": _code(Phase, "which part of the step"),
        "dtype": _code(Dtype, "number format"),
        "priority": _count(0, "on free lanes, higher goes first"),
        "order": Column(np.int64, 0, "place in the issue order of its lanes"),
        "shape": _text("sizes a price needs, as key=value,key=value"),
        "group": _text("the ranks a collective spans: 0-7, 0-56/8, 0+3+5"),
        "micro_batch": _count(0, "which micro-batch", low=0),
        "source": _code(Source, "where `seconds` comes from"),
        "sigma": Column(np.float32, 0.0, "relative standard error of `seconds`", low=0.0),
    }
)


def column(name: str) -> Column:
    """The column of that name, or an error that offers the nearest."""
    if name not in COLUMNS:
        raise unknown("column", name, COLUMNS)
    return COLUMNS[name]


def code_of(words: type[IntEnum], text: str) -> int:
    """The code of a word: `kernel` → Kind.KERNEL."""
    try:
        return int(words[text.upper().replace("-", "_")])
    except KeyError:
        raise unknown(words.__name__.lower(), text, (w.name.lower() for w in words)) from None


def word_of(words: type[IntEnum], code: int) -> str:
    """The word of a code: Kind.KERNEL → `kernel`."""
    return words(int(code)).name.lower()


def coded(name: str, value: str, number: Callable[[str], int]) -> int:
    """The code of a word or string in a column; `number` numbers the strings."""
    spec = column(name)
    if spec.words:
        return code_of(spec.words, value)
    if spec.is_text:
        return number(value)
    raise InputError(f"column `{name}` holds numbers, not `{value}`")


def is_default(name: str, array: Array) -> bool:
    """Whether a column has its default everywhere."""
    if name == "order":
        return bool(np.array_equal(array, np.arange(len(array))))
    return bool((array == COLUMNS[name].default).all())


def frozen(array: npt.ArrayLike, dtype: Any = None) -> Array:
    """The same numbers as an array nothing can write to; for arrays that nothing else holds."""
    out = np.ascontiguousarray(array, dtype=dtype)
    if out.flags.writeable:
        out = out.view()
        out.flags.writeable = False
    return out


def owned(values: Any, dtype: Any, what: str) -> Array:
    """The same numbers, read-only and safe from other holders of `values`: copied where need be."""
    out = np.ascontiguousarray(fitted(values, dtype, what))
    is_fresh = isinstance(values, (list, tuple)) or (
        isinstance(values, np.ndarray) and not np.may_share_memory(out, values)
    )
    if not is_fresh and _is_open(out):
        out = out.copy()
    out.flags.writeable = False
    return out


def fitted(values: Any, dtype: Any, what: str) -> Array:
    """The values as an array of a type, or an error where that would change one of them."""
    array, kind = np.asarray(values), np.dtype(dtype)
    if array.dtype == kind:
        return array
    if array.size == 0:
        return array.astype(kind)
    if array.dtype.kind not in "iufb":
        raise GraphError(f"{what} holds {array.ravel()[0]!r}, which is not a {kind}")
    with np.errstate(all="ignore"):
        cast = array.astype(kind)
        is_same = kind.kind == "f" or np.array_equal(cast, array)
    if not is_same:
        raise GraphError(f"{what} holds {array[cast != array][0]}, which is not a {kind}")
    return cast


def _is_open(array: Array) -> bool:
    """Whether the memory of an array can still be written to from elsewhere."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    return not (owner is None or isinstance(owner, bytes))
