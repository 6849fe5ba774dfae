"""Profiler traces read and turned into graphs."""

from typing import TYPE_CHECKING

from foretell.lazy import lazy
from foretell.trace.read import Trace, read

if TYPE_CHECKING:
    from foretell.trace.export import write_chakra

__all__ = ["Trace", "read", "write_chakra"]
# Writers are loaded on first use: most callers only read.
__getattr__ = lazy(__name__, {"export": "write_chakra"})
