"""A model's training step before it is split over devices.

>>> from foretell.workload import load
>>> model = load("gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200")
>>> round(model.parameters / 1e9, 1)
174.6
"""

from typing import TYPE_CHECKING

from foretell.lazy import lazy
from foretell.workload.load import FAMILIES, load
from foretell.workload.workload import Exchange, Layer, Op, Tensor, Workload

if TYPE_CHECKING:
    from foretell.workload.captured import from_graph as from_graph

__all__ = ["FAMILIES", "Exchange", "Layer", "Op", "Tensor", "Workload", "from_graph", "load"]
# Built-in models do without what recorded steps need.
__getattr__ = lazy(__name__, {"captured": "from_graph"})
