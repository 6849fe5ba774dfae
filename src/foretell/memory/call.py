"""One recorded operator call, and what its recorded inputs say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

Dims = tuple[int, ...]
Key = tuple[Dims, str]  # sizes and number format

ITEMS = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "long": 8,
    "int": 4, "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1,
    "c10::complex<float>": 8, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip
FLOATS = ("double", "float", "c10::BFloat16", "c10::Half", "c10::Float8_e4m3fn", "c10::Float8_e5m2")
# c10::ScalarType, as a trace writes a `dtype` argument.
CODES = {
    0: "unsigned char", 1: "signed char", 2: "short", 3: "int", 4: "long int", 5: "c10::Half",
    6: "float", 7: "double", 9: "c10::complex<float>", 11: "bool", 15: "c10::BFloat16",
}  # fmt: skip


@dataclass(slots=True)
class Call:
    """An operator with what it lies in; a list of tensors is a tuple of sizes."""

    name: str  # without `aten::`
    dims: tuple[Dims | tuple[Dims, ...], ...] = ()
    types: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    sequence: int = -1
    start: float = 0.0
    phase: int = 0
    inner: list[Call] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)

    def tensor(self, k: int) -> Key | None:
        """Size and format of one input, where it is a tensor."""
        if k >= len(self.dims) or k >= len(self.types) or self.types[k] not in ITEMS:
            return None
        sizes = self.dims[k]
        if sizes and isinstance(sizes[0], tuple):
            return None
        return sizes, self.types[k]  # type: ignore[return-value]

    def tensors(self) -> list[Key]:
        """All inputs that are tensors with a size; those of lists are floats."""
        found: list[Key] = []
        for k, sizes in enumerate(self.dims):
            own = self.tensor(k)
            if own is not None:
                found.append(own)
            elif sizes and isinstance(sizes[0], tuple):
                found += [(s, "") for s in sizes]
        return found

    def ints(self, k: int) -> list[int] | None:
        """A plain argument that is a number or a list of numbers."""
        return numbers(self.values[k]) if k < len(self.values) else None

    def flag(self, k: int) -> bool:
        return k < len(self.values) and self.values[k] == "True"

    def code(self, k: int) -> str | None:
        """A `dtype` argument."""
        found = self.ints(k)
        return CODES.get(found[0]) if found else None

    def walk(self) -> Iterator[Call]:
        """Itself and all that lies in it, in order."""
        yield self
        for one in self.inner:
            yield from one.walk()


@lru_cache(65536)
def numbers(text: str) -> list[int] | None:
    """`[2, 2]` → [2, 2]; none where it is something else."""
    try:
        found = json.loads(text) if text else None
    except ValueError:
        return None
    found = [found] if isinstance(found, int) and not isinstance(found, bool) else found
    return found if isinstance(found, list) and all(type(n) is int for n in found) else None


def count(dims: Dims) -> int:
    """Numbers in a tensor."""
    return prod(dims)
