"""Profiler traces read and turned into graphs."""

from typing import TYPE_CHECKING, Any

from foretell.trace.read import Trace, read

if TYPE_CHECKING:
    from foretell.trace.export import write_chakra

__all__ = ["Trace", "read", "write_chakra"]


def __getattr__(name: str) -> Any:
    """What writes is loaded when it is asked for: most only read."""
    if name != "write_chakra":
        raise AttributeError(f"module `foretell.trace` has no `{name}`")
    from foretell.trace.export import write_chakra

    return write_chakra
