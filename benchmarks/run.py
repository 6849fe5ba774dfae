"""Every speed figure, one table after the other: `make bench` or `python benchmarks/run.py`."""

import sys

import simulator
from table import show

if __name__ == "__main__":
    quick = "--quick" in sys.argv
    show("Simulator and graph", simulator.rows(quick))
