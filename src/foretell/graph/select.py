"""Which tasks are meant, as a person writes it: `op=gemm/conv*+phase=backward`.

Conditions are joined by `+` and must all hold; of values joined by `/` one must. A value is a word,
a string with `*` for anything, or a number; `!=` turns a condition round. `all` means every task.
"""

from __future__ import annotations

import re

import numpy as np

from foretell.errors import InputError
from foretell.graph.graph import Array, Graph, Ids, column, matches

_CONDITION = re.compile(r"([a-z_]+)(!?=)(.+)")


def chosen(graph: Graph, text: str) -> Ids:
    """The tasks a text means, ascending."""
    mask = np.ones(graph.size, bool)
    if text != "all":
        for part in text.split("+"):
            mask &= _holds(graph, part.strip(), text)
    return np.flatnonzero(mask)


def _holds(graph: Graph, part: str, whole: str) -> Array:
    found = _CONDITION.fullmatch(part)
    if not found:
        raise InputError(
            f"`{part}` in `{whole}` is not column=value",
            hint="write op=gemm/conv*+phase=backward, or all",
        )
    name, sign, values = found.groups()
    spec = column(name)
    is_text = spec.words is not None or spec.is_text
    wanted = [v if is_text else _number(v, whole) for v in values.split("/")]
    mask = matches(graph, name, wanted)
    return ~mask if sign == "!=" else mask


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"`{text}` in `{whole}` is not a number") from None
