"""Compiled loops made: their Python translated to C++, and built into libraries."""
