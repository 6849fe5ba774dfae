"""A layout as data, and the graph it makes of a workload on a cluster."""

from foretell.plan.check import check
from foretell.plan.costs import Memory, memory
from foretell.plan.lower import lower
from foretell.plan.plan import Plan, load, read, save
from foretell.plan.prices import Estimate, estimate

__all__ = [
    "Estimate",
    "Memory",
    "Plan",
    "check",
    "estimate",
    "load",
    "lower",
    "memory",
    "read",
    "save",
]
