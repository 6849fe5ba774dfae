"""Every planner by its name; a new one is one class and one line here."""

from __future__ import annotations

from importlib import import_module

from foretell.search.planner import Planner
from foretell.spec import parse as parse_spec

# name -> module and class: imported when asked for, since some need solvers.
PLANNERS: dict[str, tuple[str, str]] = {
    "oracle": ("foretell.search.oracle.planner", "Oracle"),
}


def planners() -> dict[str, type[Planner]]:
    """All planners, imported."""
    return {name: getattr(import_module(m), c) for name, (m, c) in PLANNERS.items()}


def parse(spec: str) -> Planner:
    """The planner a spec stands for."""
    name = spec.partition(":")[0]
    known: dict[str, type[Planner]] = dict.fromkeys(PLANNERS, Planner)
    if name in PLANNERS:
        module, kind = PLANNERS[name]
        known[name] = getattr(import_module(module), kind)
    found = parse_spec(spec, known, "planner")
    assert isinstance(found, Planner)
    return found
