"""Measures what operators cost on the machine at hand: on its device, and to its host.

    python -m foretell.pytorch.bench -o mine.csv          measure, within a time limit

Reading a table needs no torch; measuring does. docs/concepts/bench.md says how and how well.
"""

from foretell.pytorch.bench.case import Case, case
from foretell.pytorch.bench.table import Row, load, load_header

__all__ = ["Case", "Row", "case", "load", "load_header"]
