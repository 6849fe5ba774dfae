"""Loops that run compiled: written in Python, built once as C++ by the machine's own compiler.

    @compiled
    def total(values: F1) -> float:
        ...

`F1` is a 1-D array of float64, `F2` a 2-D one. The other letters: `I` int64, `J` int32, `S` int16,
`C` int8, `U` uint8, `B` bool, `H` float32. A
loop whose parameters all have a type can be called from Python; the others are called by loops.
Without a compiler every loop runs as plain Python: slower, with the same answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

P = ParamSpec("P")
R = TypeVar("R")

F1 = npt.NDArray[np.float64]
F2 = npt.NDArray[np.float64]
F3 = npt.NDArray[np.float64]
F4 = npt.NDArray[np.float64]
I1 = npt.NDArray[np.int64]
I2 = npt.NDArray[np.int64]
I3 = npt.NDArray[np.int64]
J1 = npt.NDArray[np.int32]
S1 = npt.NDArray[np.int16]
C1 = npt.NDArray[np.int8]
U1 = npt.NDArray[np.uint8]
B1 = npt.NDArray[np.bool_]
B2 = npt.NDArray[np.bool_]
B3 = npt.NDArray[np.bool_]
H1 = npt.NDArray[np.float32]
H2 = npt.NDArray[np.float32]

_CODES = {
    ord("?"): np.bool_, ord("d"): np.float64, ord("f"): np.float32, ord("B"): np.uint8,
    ord("b"): np.int8, ord("h"): np.int16, ord("i"): np.int32, ord("l"): np.int64,
}  # fmt: skip
LOOPS: list[Loop] = []


class Loop:
    """A function that runs compiled where it can."""

    def __init__(self, function: FunctionType) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.native: Callable[[tuple[Any, ...]], Any] | None = None
        self.is_bound = False
        code, annotations = function.__code__, function.__annotations__
        self.arity = code.co_argcount
        self.is_entry = all(
            annotations.get(n, "Any") != "Any" for n in code.co_varnames[: self.arity]
        )
        self.returns = annotations.get("return")
        LOOPS.append(self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the loop, compiled where it was built."""
        if not self.is_bound:
            self._bind()
        if self.native is None:
            return self.function(*args, **named)
        if named or len(args) != self.arity:
            args = self._in_order(args, named)
        try:
            found = self.native(args)
        except TypeError:
            found = self._fitted(args)
        return self._shown(found)

    def _bind(self) -> None:
        from foretell.compiled.build import native

        self.is_bound = True
        if self.is_entry:
            self.native = native(self.function)

    def _in_order(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        from inspect import signature

        bound = signature(self.function).bind(*args, **named)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def _fitted(self, args: tuple[Any, ...]) -> Any:
        """Call with arrays cast to the required types, and cast results back."""
        from foretell.compiled.fitting import fitted

        assert self.native is not None
        given, pairs = fitted(self.function, args)
        found = self.native(given)
        for mine, theirs in pairs:
            if mine.flags.writeable and not np.array_equal(
                mine, theirs, equal_nan=mine.dtype.kind == "f"
            ):
                mine[...] = theirs
        return found

    def _shown(self, found: Any) -> Any:
        if type(found) is not tuple:
            return found
        if len(found) == 3 and type(found[2]) is bytearray:
            code, shape, raw = found
            return np.frombuffer(raw, _CODES[code]).reshape(shape)
        items = tuple(self._shown(item) for item in found)
        made = self.function.__globals__.get(str(self.returns))
        return made(*items) if isinstance(made, type) and hasattr(made, "_fields") else items


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """A loop that runs compiled where it can."""
    return cast(Callable[P, R], Loop(cast(FunctionType, function)))
