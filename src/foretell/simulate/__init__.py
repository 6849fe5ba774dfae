"""Simulate a graph, and ask questions of the timeline.

`foretell.simulate` is this package and also the function: the package can be called.
"""

from foretell.simulate.engine import simulate
from foretell.simulate.timeline import Span, Timeline, timeline

__all__ = ["Span", "Timeline", "simulate", "timeline"]
