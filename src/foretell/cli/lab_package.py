"""Commands of the package `foretell_lab`, imported only when one of them is used."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from foretell.errors import InputError

PACKAGE = "foretell_lab"


def has_lab() -> bool:
    """Whether the lab is installed."""
    return find_spec(PACKAGE) is not None


def lab_module(name: str) -> ModuleType:
    """A module of the lab by its name there; an error with a hint where it is not installed."""
    if not has_lab():
        raise InputError(
            "this needs the package foretell-lab, which is not installed",
            hint="in a checkout of foretell: pip install ./lab",
        )
    return import_module(f"{PACKAGE}.{name}")
