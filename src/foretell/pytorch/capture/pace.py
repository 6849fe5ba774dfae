"""How far a capture is: by modules while it runs forward, by operators from there on.

A backward pass has about twice the operators of the forward pass (two matmuls for one), and
running one on fake tensors takes the same whatever it is: so the whole is about three forward
passes, and the optimizer and the graph are the little that is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.graph import Phase

FORWARD, BACKWARD = 0.32, 0.96  # shares of a capture that are done when these passes are
EVERY = 16  # operators between two words


@dataclass
class Pace:
    """Told of every module and operator; says which share of the capture is done."""

    progress: Callable[[str, float], None] = lambda words, share: None
    modules: int = 0  # of the model
    entered: int = 0
    forward: int = 0  # operators of the forward pass

    def enter(self) -> None:
        """A module begins to run."""
        self.entered += 1
        of = max(self.modules, self.entered)
        self.progress(f"forward, module {self.entered} of {of}", FORWARD * self.entered / of)

    def note(self, phase: Phase, operators: int) -> None:
        """So many operators have been written down."""
        if phase in (Phase.FORWARD, Phase.LOSS):
            self.forward = operators
        elif operators % EVERY == 0:
            done = min((operators - self.forward) / (2 * self.forward + 1), 1.0)
            share = BACKWARD if phase == Phase.UPDATE else FORWARD + (BACKWARD - FORWARD) * done
            self.progress(f"{phase.name.lower()}, {operators:,} operators", share)
