"""Small steps made by code, for the demonstration, the guides and tests. Nothing is priced yet."""

from foretell.samples.transformer import transformer

__all__ = ["transformer"]
