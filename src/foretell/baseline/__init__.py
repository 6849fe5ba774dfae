"""What is known of a step before anything is changed: how long it really takes, steps in a row."""

from foretell.baseline.steady import steady_seconds
from foretell.baseline.unprofiled import Baseline, unprofiled

__all__ = ["Baseline", "steady_seconds", "unprofiled"]
