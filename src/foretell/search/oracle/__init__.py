"""Every way to split a model over devices: time, memory, money, and what limits each."""

from foretell.search.oracle.limits import Finding, findings, limits
from foretell.search.oracle.scale import Row, counts, scaling
from foretell.search.oracle.space import Choice, Space, Swept, choose, layouts, strategy, sweep

__all__ = [
    "Choice", "Finding", "Row", "Space", "Swept", "choose", "counts", "findings", "layouts",
    "limits", "scaling", "strategy", "sweep",
]  # fmt: skip
