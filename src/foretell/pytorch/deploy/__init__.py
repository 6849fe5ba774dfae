"""Plans made to run on stock PyTorch: a file a mechanism, `deploy` puts together what a plan names.

Loaded when used: launching and reading actions need no torch.
"""

from __future__ import annotations

from foretell.lazy import lazy

__all__ = ["Deployed", "Pipeline", "deploy", "launch", "parallelize"]
__getattr__ = lazy(
    __name__,
    {
        "actions": "Pipeline",
        "apply": "Deployed deploy parallelize",
        "launcher": "launch",
    },
)
