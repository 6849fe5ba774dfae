"""Marks what one step of a training script is, for `foretell profile`.

    import foretell

    for batch in loader:
        with foretell.profile.step():
            train(batch)

A step lasts from the end of one mark to the end of the next, so that loading data between them
counts. Outside of `foretell profile` a mark does nothing, and nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Recorder(Protocol):
    """A listener for the ends of steps."""

    def end(self) -> None:
        """A step has ended."""


_recorders: list[Recorder] = []  # the one in charge last; none outside of `foretell profile`


@contextmanager
def step() -> Iterator[None]:
    """Everything inside is one step of training."""
    yield
    if _recorders:
        _recorders[-1].end()


@contextmanager
def recording_to(recorder: Recorder) -> Iterator[None]:
    """Notify a recorder of the steps that end inside."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.remove(recorder)
