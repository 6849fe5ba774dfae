"""Every what-if by its name, the order in which several compose, and how far each is off by itself.

A new what-if is one file and its place in `ORDER`; it is imported when it is used. However they are
written, a later change sees what the earlier ones left. Number formats, layouts and attention are
read off the shapes of the trace, so the batch grows behind them; a compiler sees the kernels it is
given; a CUDA graph replays what is left on the host; ranks exchange the gradients of all that.
Free-form edits that pick tasks by name come first, those that scale times last. The spread of each
is read from `spread.toml`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from foretell.errors import ForetellError, InputError
from foretell.graph.graph import Graph
from foretell.spec import parse as parse_spec
from foretell.whatif.base import DoesNotApply, Setting, WhatIf

# Every what-if, in canonical order.
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
# Those that share a file with others; any other is in one of its own name.
ELSEWHERE = {
    "faster": "scale", "insert": "remove",
    "foreach-optimizer": "optimizer", "fused-optimizer": "optimizer",
}  # fmt: skip


class Registry(Mapping[str, type[WhatIf]]):
    """What-ifs by name."""

    def __getitem__(self, name: str) -> type[WhatIf]:
        if name not in _PLACE:
            raise KeyError(name)
        module = import_module(f"foretell.whatif.{ELSEWHERE.get(name, name.replace('-', '_'))}")
        kinds = (k for k in vars(module).values() if isinstance(k, type) and issubclass(k, WhatIf))
        return next(k for k in kinds if k.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(ORDER))

    def __len__(self) -> int:
        return len(ORDER)


WHATIFS = Registry()


def parse(spec: str) -> WhatIf:
    """The what-if a spec stands for."""
    found = parse_spec(spec, WHATIFS, "what-if")
    assert isinstance(found, WhatIf)
    return found


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


NEVER = "never"  # the table of what-ifs without measured rows


@cache
def _spreads() -> dict[str, Any]:
    """The tables of `spread.toml`."""
    text = files("foretell.whatif").joinpath("spread.toml").read_text("utf-8")
    return tomllib.loads(text)


@cache
def _table() -> dict[str, tuple[float, str]]:
    """Spread and the name of its group, by what-if."""
    groups = ((group, rows) for group, rows in _spreads().items() if group != "memory")
    return {name: (float(s), group) for group, rows in groups for name, s in rows.items()}


def spread_of(name: str) -> float:
    """Spread of ln(measured / predicted) of a what-if, beside what prices and host leave open."""
    return _table()[name][0]


def is_measured(name: str) -> bool:
    """Whether something measured stands behind a what-if."""
    return _table()[name][1] != NEVER


def together(changes: Iterable[WhatIf]) -> float:
    """The spread of several what-ifs, as independent errors add up."""
    return math.hypot(*(spread_of(change.name) for change in changes))


def peak_between(
    peak: float, changes: Iterable[WhatIf], *, is_given: bool, ran_before: bool
) -> tuple[float, float]:
    """Between which bytes the peak of a changed step lies in 80 % of cases.

    `is_given`: the plain step's was measured. Otherwise a process that `ran_before` other steps may
    hold what those left.
    """
    known = _spreads()["memory"]
    table = known["given" if is_given else "alone"]
    sides = [table["any"], *(table[c.name] for c in changes if c.name in table)]
    least, most = min(low for low, _ in sides), max(high for _, high in sides)
    besides = known["earlier"] if ran_before and not is_given else 0.0
    return peak * math.exp(least), peak * math.exp(most) + besides
