"""One optimisation a file: what a change would make of a step."""

from __future__ import annotations

from foretell.spec import parse as parse_spec
from foretell.whatif.base import DoesNotApply, Setting, WhatIf, applied
from foretell.whatif.batch import Batch
from foretell.whatif.checkpoint import Checkpoint
from foretell.whatif.cuda_graph import CudaGraph
from foretell.whatif.optimizer import ForeachOptimizer, FusedOptimizer
from foretell.whatif.remove import Insert, Remove
from foretell.whatif.scale import Faster, Scale

# Every what-if by its name; a new one is one file and one line here.
WHATIFS: dict[str, type[WhatIf]] = {
    change.name: change
    for change in (
        Batch,
        Checkpoint,
        CudaGraph,
        Faster,
        ForeachOptimizer,
        FusedOptimizer,
        Insert,
        Remove,
        Scale,
    )
}


def parse(spec: str) -> WhatIf:
    """The what-if a spec stands for."""
    found = parse_spec(spec, WHATIFS, "what-if")
    assert isinstance(found, WhatIf)
    return found


__all__ = ["WHATIFS", "DoesNotApply", "Setting", "WhatIf", "applied", "parse"]
