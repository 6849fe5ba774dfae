"""Every speed figure, one table after the other: `make bench` or `python benchmarks/run.py`."""

import sys

import capture
import oracle
import page
import schedules
import simulator
import startup
from table import show

import studio

if __name__ == "__main__":
    show("Simulator and graph", simulator.rows("--quick" in sys.argv))
    show("Start-up", startup.rows())
    show("Capture", capture.rows())
    show("Oracle", oracle.rows())
    show("Schedules", schedules.rows("--quick" in sys.argv))
    show("Report page", page.rows())
    show("Studio", studio.rows())
