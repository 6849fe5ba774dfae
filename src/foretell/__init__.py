"""Tells how a DNN training step will run before it is run, finds a faster way, and runs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public names and the module each lives in; loaded when first used, so that importing is quick.
_PUBLIC = {
    "Builder": "foretell.graph",
    "Cluster": "foretell.cluster",
    "Graph": "foretell.graph",
    "Timeline": "foretell.simulate",
    "capture": "foretell.pytorch.capture",
    "concat": "foretell.graph",
    "deploy": "foretell.pytorch.deploy",
    "load": "foretell.graph",
    "parallelize": "foretell.pytorch.deploy",
    "parse": "foretell.graph",
    "price": "foretell.cost",
    "read": "foretell.trace",
    "replicate": "foretell.graph",
    "save": "foretell.graph",
    "simulate": "foretell.simulate",
}

_MODULES = ("profile",)  # public as a whole

__all__ = ["__version__", *_PUBLIC, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"foretell.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module `foretell` has no `{name}`")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
