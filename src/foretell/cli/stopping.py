"""A command that is asked to end does so as with Ctrl-C: what it started ends first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def terminated_as_stopped() -> Iterator[None]:
    """SIGTERM, which schedulers send, raises KeyboardInterrupt inside."""
    if threading.current_thread() is not threading.main_thread():  # only there may it be caught
        yield
        return
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt
