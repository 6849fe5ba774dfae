"""What is known of a step before anything is changed: how long it really takes, steps in a row."""

from foretell.baseline.bottleneck import Interval, interval, why
from foretell.baseline.deprofile import Baseline, steady_seconds, unprofiled

__all__ = ["Baseline", "Interval", "interval", "steady_seconds", "unprofiled", "why"]
