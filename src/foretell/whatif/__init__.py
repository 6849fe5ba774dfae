"""One optimisation a file: what a change would make of a step."""

from typing import TYPE_CHECKING

from foretell.lazy import lazy
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
# Memory is loaded when it is asked about.
__getattr__ = lazy(__name__, {"memory_effect": "peak_bytes"})
