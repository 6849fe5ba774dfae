"""A workload from a step that was captured or traced: the user's own model for every planner.

    workload = from_graph(foretell.capture(model, batch, …))

Calls become ops (→ `ops`), modules become layers (→ `build`), equal layers in a row become one that
is repeated. Linear layers around attention and in feed-forwards can be split over tensor-parallel
ranks (→ `roles`), convolutions over filters, channels and pixels; what is not understood stays
whole there, and `notes` says so.
"""

from foretell.workload.captured.build import from_graph

__all__ = ["from_graph"]
