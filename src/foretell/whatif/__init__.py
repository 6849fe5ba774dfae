"""One optimisation a file: what a change would make of a step."""

from foretell.whatif.base import DoesNotApply, Setting, WhatIf, applied
from foretell.whatif.held import peak_bytes
from foretell.whatif.registry import WHATIFS, parse

__all__ = ["WHATIFS", "DoesNotApply", "Setting", "WhatIf", "applied", "parse", "peak_bytes"]
