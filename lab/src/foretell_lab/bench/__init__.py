"""What operators cost on the machine at hand, on its device and to its host, as a table.

    python -m foretell_lab.bench -o mine.csv                            measure, within a time limit
    python -m foretell_lab.bench --merge a.csv b.csv -o mine.csv.gz     several runs, one table
    python -m foretell_lab.bench --summary mine.csv.gz                  what a table tells

Reading a table needs no torch; measuring does. docs/concepts/bench.md says how and how well.
"""

from foretell_lab.bench.case import Case, case
from foretell_lab.bench.table import Row, load, load_header

__all__ = ["Case", "Row", "case", "load", "load_header"]
