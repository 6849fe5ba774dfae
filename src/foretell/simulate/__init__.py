"""Play a graph and ask questions of what came of it.

`foretell.simulate` is this room and also the function people call most: the room can be called.
"""

import sys
from types import ModuleType
from typing import Any

from foretell.simulate.engine import simulate
from foretell.simulate.timeline import Span, Timeline, timeline

__all__ = ["Span", "Timeline", "simulate", "timeline"]


class _Room(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Timeline:
        return simulate(*args, **options)


sys.modules[__name__].__class__ = _Room
