"""One thing to measure: an operator, a direction, a number format, a layout and sizes.

A case is plain text through and through (`linear forward bf16 nk m=4096;n=768;k=768`), so that
what was asked and what was found can be laid side by side on another machine without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foretell.errors import InputError

Size = int | str

# Bytes of one element. `tf32` is fp32 in memory; fp32 means that tf32 is switched off.
SIZES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "bool": 1}


@dataclass(frozen=True)
class Case:
    """An operator call to measure; `shape` holds named sizes, in order."""

    op: str
    direction: str  # forward, backward; dgrad and wgrad where a backward has two parts; step
    dtype: str  # fp32, tf32, bf16, fp16; `fp32>bf16` for a cast; amp_bf16 for host costs
    layout: (
        str  # how the operands lie in memory, in the words of the op; `-` where there is one way
    )
    shape: tuple[tuple[str, Size], ...]

    def __getitem__(self, name: str) -> int:
        value = dict(self.shape).get(name)
        if not isinstance(value, int):
            raise InputError(f"case `{self}` has no size `{name}`")
        return value

    def word(self, name: str, default: str = "") -> str:
        """A size that is a word, or the default where it is not given."""
        return str(dict(self.shape).get(name, default))

    def size(self, name: str, default: int) -> int:
        """A size, or the default where it is not given."""
        return self[name] if name in dict(self.shape) else default

    @property
    def elements(self) -> int:
        """Bytes of one element; of the wider side of a cast."""
        return max(SIZES.get(part.removeprefix("amp_"), 4) for part in self.dtype.split(">"))

    def __str__(self) -> str:
        return " ".join((self.op, self.direction, self.dtype, self.layout, text(self.shape)))


def case(
    op: str, direction: str = "forward", dtype: str = "fp32", layout: str = "-", **shape: Size
) -> Case:
    """A case from named sizes."""
    return Case(op, direction, dtype, layout, tuple(shape.items()))


def text(shape: tuple[tuple[str, Size], ...]) -> str:
    """`m=4096;n=768`."""
    return ";".join(f"{name}={value}" for name, value in shape)


def read_shape(written: str) -> tuple[tuple[str, Size], ...]:
    """The sizes that `text` wrote."""
    parts = [part.partition("=") for part in written.split(";") if part]
    for name, equals, value in parts:
        if not (name and equals and value):
            raise InputError(
                f"`{written}` is no shape: `{name}{equals}{value}` is not `name=value`",
                hint="sizes read `m=4096;n=768;k=768`",
            )
    return tuple((name, int(value) if _is_whole(value) else value) for name, _, value in parts)


def parse_case(written: str) -> Case:
    """The case that prints so."""
    parts = written.split()
    if len(parts) != 5:
        raise InputError(
            f"`{written}` is no case: {len(parts)} words where 5 are needed",
            hint="write `linear forward bf16 nk m=4096;n=768;k=768`",
        )
    op, direction, dtype, layout, shape = parts
    return Case(op, direction, dtype, layout, read_shape(shape))


def read_case(row: Mapping[str, str]) -> Case:
    """The case a row of a table speaks of."""
    return Case(row["op"], row["direction"], row["dtype"], row["layout"], read_shape(row["shape"]))


def _is_whole(value: str) -> bool:
    return value.removeprefix("-").isdigit()
