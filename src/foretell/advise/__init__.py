"""What to change first: every change that applies to a step, tried and ranked."""

from foretell.advise.advise import Advice, Recommendations, advise
from foretell.advise.step import Step

__all__ = ["Advice", "Recommendations", "Step", "advise"]
