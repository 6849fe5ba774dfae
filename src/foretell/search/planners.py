"""Every planner by its name: loaded when asked for, so that one costs one room."""

from __future__ import annotations

from importlib import import_module

from foretell.search.planner import Planner
from foretell.spec import parse as parse_spec
from foretell.spec import split

# name -> (module in this room, class in it). A new planner is one class and one line here.
PLANNERS: dict[str, tuple[str, str]] = {
    "joint": ("joint", "Joint"),
    "oracle": ("oracle.planner", "Oracle"),
    "placement": ("placement.planner", "PlacementPlanner"),
    "tag": ("placement.planner", "Tag"),
    "fusion": ("fusion.planner", "FusionPlanner"),
    "disco": ("fusion.planner", "Disco"),
    "schedule": ("schedule.planner", "PipelinePlanner"),
    "tessel": ("schedule.planner", "Tessel"),
}


def planners() -> dict[str, type[Planner]]:
    """Every planner's class by its name."""
    return {name: _load(name) for name in PLANNERS}


def parse(text: str) -> Planner:
    """The planner a spec stands for, such as `oracle:simulate=16`."""
    name, _ = split(text)
    kinds = {known: _load(known) if known == name else Planner for known in PLANNERS}
    found = parse_spec(text, kinds, "planner")
    assert isinstance(found, Planner)
    return found


def _load(name: str) -> type[Planner]:
    module, kind = PLANNERS[name]
    found: type[Planner] = getattr(import_module(f"foretell.search.{module}"), kind)
    return found
