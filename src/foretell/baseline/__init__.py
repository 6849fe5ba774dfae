"""What is known of a step before anything is changed: how long it really takes, steps in a row."""

from foretell.baseline.interval import Interval, interval
from foretell.baseline.steady import steady_seconds
from foretell.baseline.unprofiled import Baseline, unprofiled
from foretell.baseline.why import why

__all__ = ["Baseline", "Interval", "interval", "steady_seconds", "unprofiled", "why"]
