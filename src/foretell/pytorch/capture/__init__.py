"""A model's training step as a graph, from fake tensors: no GPU, no weights, no data."""

from foretell.pytorch.capture.entry import capture

__all__ = ["capture"]
