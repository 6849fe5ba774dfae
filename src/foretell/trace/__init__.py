"""Profiler traces read and turned into graphs."""

from foretell.trace.export import write_chakra
from foretell.trace.read import Trace, read
from foretell.trace.summary import Summary, summary

__all__ = ["Summary", "Trace", "read", "summary", "write_chakra"]
