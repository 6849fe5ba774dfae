"""Every way to split a model over devices: time, memory, money, and what limits each."""

from foretell.search.oracle.choose import Choice, choose
from foretell.search.oracle.limits import Finding, findings, limits
from foretell.search.oracle.scale import Row, counts, scaling
from foretell.search.oracle.space import Space, layouts, strategy
from foretell.search.oracle.sweep import Swept, sweep

__all__ = [
    "Choice", "Finding", "Row", "Space", "Swept", "choose", "counts", "findings", "layouts",
    "limits", "scaling", "strategy", "sweep",
]  # fmt: skip
