"""Plans made to run on stock PyTorch: a file a mechanism, `deploy` puts together what a plan names.

Loaded when used: launching and reading actions need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Deployed": "apply",
    "Pipeline": "actions",
    "deploy": "apply",
    "launch": "launcher",
    "parallelize": "loop",
}

__all__ = ["Deployed", "Pipeline", "deploy", "launch", "parallelize"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module `foretell.pytorch.deploy` has no `{name}`")
    return getattr(import_module(f"foretell.pytorch.deploy.{_PUBLIC[name]}"), name)
