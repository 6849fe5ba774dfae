"""How far each what-if is off by itself, and whether it was ever measured: read off a data file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from foretell.whatif.base import WhatIf

NEVER = "never"  # the table of what-ifs without measured rows


@cache
def _table() -> dict[str, tuple[float, str]]:
    """Spread and the name of its group, by what-if."""
    text = files("foretell.whatif").joinpath("spread.toml").read_text("utf-8")
    groups = tomllib.loads(text)
    return {name: (float(s), group) for group, rows in groups.items() for name, s in rows.items()}


def spread_of(name: str) -> float:
    """Spread of ln(measured / predicted) of a what-if, beside what prices and host leave open."""
    return _table()[name][0]


def is_measured(name: str) -> bool:
    """Whether something measured stands behind a what-if."""
    return _table()[name][1] != NEVER


def together(changes: Iterable[WhatIf]) -> float:
    """The spread of several what-ifs, as independent errors add up."""
    return math.hypot(*(spread_of(change.name) for change in changes))
