"""What a shell offers where a name is wanted: what-ifs, planners, strategies, clusters.

Loaded when somebody presses Tab; what a spec needs besides its name, a person writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click


def changes(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """Names of what-ifs."""
    from foretell.whatif import WHATIFS

    return _starting(WHATIFS, begun)


def names(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """All that `foretell explain` knows."""
    from foretell.search.oracle.strategies import STRATEGIES
    from foretell.search.planners import PLANNERS
    from foretell.whatif import WHATIFS

    return _starting({*WHATIFS, *PLANNERS, *STRATEGIES}, begun)


def planners(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """Names of planners."""
    from foretell.search.planners import PLANNERS

    return _starting(PLANNERS, begun)


def clusters(_: click.Context, __: click.Parameter, begun: str) -> list[Any]:
    """Names of presets, and files."""
    from click.shell_completion import CompletionItem

    from foretell.cluster.preset import names as presets

    found = _starting(presets(), begun)
    return [CompletionItem(name) for name in found] or [CompletionItem(begun, type="file")]


def _starting(known: Iterable[str], begun: str) -> list[str]:
    return sorted(name for name in known if name.startswith(begun))
