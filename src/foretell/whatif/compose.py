"""Several what-ifs on one step: the order in which they compose, however they are written.

A later change sees what the earlier ones left. Number formats, layouts and attention are read off
the shapes of the trace, so the batch grows behind them; a compiler sees the kernels it is given;
a CUDA graph replays what is left on the host; ranks exchange the gradients of all that. Free-form
edits that pick tasks by name come first, those that scale times last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foretell.errors import ForetellError, InputError
from foretell.graph.graph import Graph
from foretell.whatif.base import DoesNotApply, Setting, WhatIf

ORDER = (
    "remove", "insert",
    "device",
    "foreach-optimizer", "fused-optimizer",
    "amp", "tf32", "channels-last",
    "flash-attention", "metaflow", "reconstructed-batchnorm",
    "batch",
    "async-copies", "remove-sync", "loader",
    "compile",
    "gist", "vdnn", "checkpoint",
    "faster-host", "cuda-graph",
    "data-parallel", "fsdp", "accumulate",
    "bucket-size", "overlap", "blueconnect", "dgc", "powersgd", "local-sgd",
    "p3", "parameter-server",
    "network",
    "faster", "scale",
)  # fmt: skip
_PLACE = {name: place for place, name in enumerate(ORDER)}
# Changes of which a step can have one, and why.
EXCLUSIVE = (
    (("foreach-optimizer", "fused-optimizer"), "an optimizer has one implementation"),
    (("p3", "parameter-server"), "gradients are exchanged in one way"),
)


def ordered(changes: Iterable[WhatIf]) -> list[WhatIf]:
    """Changes in canonical order: by kind, those of one kind by their spec."""
    return sorted(changes, key=lambda c: (_PLACE[c.name], str(c)))


def applied(changes: Iterable[WhatIf], graph: Graph, setting: Setting | None = None) -> Graph:
    """The graph with all changes made, in canonical order."""
    changes = ordered(changes)
    check(changes)
    for done, change in enumerate(changes):
        try:
            graph = change.apply(graph, setting or Setting())
        except DoesNotApply as error:
            if done:
                raise _beside(error, change, changes[:done]) from error
            raise
    return graph


def tried(
    changes: Iterable[WhatIf], graph: Graph, setting: Setting | None = None
) -> tuple[Graph, list[WhatIf], list[tuple[str, str]]]:
    """The graph with those changes made that can be; which they are, and why others are not.

    Raises only where none can be made, for the reason of the first.
    """
    changes = ordered(changes)
    check(changes)
    made: list[WhatIf] = []
    refused: list[tuple[str, ForetellError]] = []
    for change in changes:
        try:
            graph = change.apply(graph, setting or Setting())
            made.append(change)
        except ForetellError as error:
            refused.append((str(change), error))
        except Exception as error:  # a change that fails must not end the answer about the others
            said = f"`{change}` could not be tried ({type(error).__name__}: {error})"
            refused.append((str(change), DoesNotApply(said)))
    if refused and not made:
        raise refused[0][1]
    return graph, made, [(spec, error.message) for spec, error in refused]


def check(changes: Sequence[WhatIf]) -> None:
    """Refuse changes that exclude each other."""
    names = {change.name for change in changes}
    for group, reason in EXCLUSIVE:
        both = [name for name in group if name in names]
        if len(both) > 1:
            raise InputError(
                f"{' and '.join(f'`{n}`' for n in both)} exclude each other: {reason}",
                hint="ask for one of them",
            )


def _beside(error: DoesNotApply, change: WhatIf, done: Sequence[WhatIf]) -> DoesNotApply:
    """The refusal of a change that comes behind others."""
    others = ", ".join(f"`{c}`" for c in done)
    return DoesNotApply(f"`{change}` behind {others}: {error.message}", hint=error.hint)
