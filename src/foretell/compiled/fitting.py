"""Arguments brought into the types and layouts that a compiled loop asks for."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import numpy as np

_LETTERS = {
    "F": np.float64, "I": np.int64, "J": np.int32, "S": np.int16, "C": np.int8, "B": np.bool_,
    "U": np.uint8, "H": np.float32,
}  # fmt: skip
Pairs = list[tuple[Any, Any]]


def fitted(loop: FunctionType, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Pairs]:
    """The arguments in the required types; pairs of an array and its copy."""
    pairs: Pairs = []
    annotations = [p.annotation for p in inspect.signature(loop).parameters.values()]
    given = tuple(_one(loop, n, a, pairs) for n, a in zip(annotations, args, strict=True))
    return given, pairs


def _one(loop: FunctionType, annotation: Any, value: Any, pairs: Pairs) -> Any:
    annotation = str(
        getattr(annotation, "__forward_arg__", None) or getattr(annotation, "__name__", annotation)
    )
    if annotation.startswith("tuple["):
        annotations = annotation.removeprefix("tuple[").removesuffix("]").split(", ")
        return tuple(_one(loop, n, v, pairs) for n, v in zip(annotations, value, strict=True))
    made: Any = loop.__globals__.get(annotation)
    if hasattr(made, "_fields"):
        fields = made.__annotations__
        return made(*(_one(loop, fields[f], getattr(value, f), pairs) for f in made._fields))
    if annotation in ("int", "float", "bool"):
        return {"int": int, "float": float, "bool": bool}[annotation](value)
    array = np.asarray(value)
    if array.ndim != int(annotation[1]):
        raise TypeError(f"`{loop.__name__}` wants {annotation}, not {array.ndim} dimensions")
    copy: Any = np.ascontiguousarray(array, _LETTERS[annotation[0]])
    if copy is not value:
        pairs.append((array, copy))
    return copy
