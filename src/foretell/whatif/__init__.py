"""One optimisation a file: what a change would make of a step."""

from typing import TYPE_CHECKING, Any

from foretell.whatif.base import DoesNotApply, Setting, WhatIf
from foretell.whatif.registry import WHATIFS, applied, ordered, parse, tried

if TYPE_CHECKING:
    from foretell.whatif.memory_effect import peak_bytes

__all__ = [
    "WHATIFS",
    "DoesNotApply",
    "Setting",
    "WhatIf",
    "applied",
    "ordered",
    "parse",
    "peak_bytes",
    "tried",
]


def __getattr__(name: str) -> Any:
    """Memory is loaded when it is asked about."""
    if name != "peak_bytes":
        raise AttributeError(f"module `foretell.whatif` has no `{name}`")
    from foretell.whatif.memory_effect import peak_bytes

    return peak_bytes
