"""Play a graph and ask questions of what came of it."""

from foretell.simulate.engine import simulate
from foretell.simulate.timeline import Span, Timeline, timeline

__all__ = ["Span", "Timeline", "simulate", "timeline"]
