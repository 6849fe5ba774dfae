"""Names of a package that are loaded on first use: importing it stays quick."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`; `where` has for each of its modules the names that live there."""
    module_of = {name: module for module, names in where.items() for name in names.split()}

    def found(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module `{package}` has no `{name}`")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return found
