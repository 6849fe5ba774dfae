"""What becomes of each tensor of an op when the samples of a batch are split.

    split     has a row for each sample: parts are concatenated             activations, errors
    partial   a sum over samples: parts are added up                        gradients of weights
    whole     the same on every rank, whatever the samples: it is copied    weights, tables

An op whose result for one sample depends on the others may still be split where training does so
by custom (`CUSTOM`: batch norm takes its statistics from a rank's own samples, as DDP does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foretell.workload import Op, Workload
from foretell.workload.kernels import RULES

Class = Literal["split", "partial", "whole"]

# kinds whose result for a sample is its own
SPLITS = frozenset(RULES) - {"batch_norm", "loss", "route", "experts"}
# kinds that look at all samples of a rank, and what is done about it when they are split
CUSTOM = {
    "batch_norm": "statistics of a rank's own samples",
    "loss": "a mean: ranks are weighted by their samples",
    "route": "each rank routes its own tokens",
    "experts": "each rank's experts see its own tokens",
}


@dataclass(frozen=True)
class Sorted:
    """The tensors of one op by what becomes of them."""

    split: tuple[str, ...]
    partial: tuple[str, ...]
    whole: tuple[str, ...]


def classes(op: Op) -> Sorted:
    """The tensors an op reads, keeps and makes; its output is `y`, the gradient of w is `dw`."""
    kept = {t.name: "batch" in t.dims for t in (*op.saved, *op.brief)}
    split = [name for name, is_split in kept.items() if is_split]
    tables = [name for name, is_split in kept.items() if not is_split]
    weights = [w.name for w in op.weights]
    made = "partial" if op.kind == "loss" else "split"
    return Sorted(
        split=(*split, *(("y",) if made == "split" else ())),
        partial=(*(f"d{name}" for name in weights), *(("y",) if made == "partial" else ())),
        whole=(*weights, *tables),
    )


def joins(parts_of: Class, wanted: Class) -> str:
    """The task that turns what producers hold into what consumers want.

    Producers that hold `split` or `partial` each hold a part; consumers of `split` want a part.
    """
    found = {
        ("split", "split"): "copy",
        ("split", "whole"): "concat",
        ("partial", "whole"): "sum",
        ("whole", "split"): "split",
        ("whole", "whole"): "copy",
        ("partial", "split"): "sum",  # and each keeps its own rows: a reduce-scatter
    }
    return found[parts_of, wanted]


def unsplit(workload: Workload) -> dict[str, str]:
    """Ops that look at all samples of a rank, and what is done about it."""
    return {
        f"{layer.name}/{op.name}": CUSTOM[op.kind]
        for layer in workload.layers
        for op in layer.works()
        if op.kind in CUSTOM
    }
