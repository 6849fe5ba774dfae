"""Built-in workloads against captures of the same models: parameters, operations, steps.

Both say what one training step does, one from published shapes and one from a PyTorch program
(`foretell_lab.samples`). A step is predicted of both, alone and split every way that both can
be, on H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretell.cluster import load as load_cluster
from foretell.plan import read
from foretell.predict import predict
from foretell.workload import Workload, from_graph, load

# Sample, its options, and the built-in spec of the same model.
MODELS: dict[str, tuple[dict[str, int], str]] = {
    "resnet50": ({}, "resnet50:dtype=tf32"),
    "vgg16": ({}, "vgg16:dtype=tf32"),
    "alexnet": ({}, "alexnet:dtype=tf32"),
    "densenet121": ({}, "densenet121:dtype=tf32"),
    "inception_v3": ({}, "inception_v3:dtype=tf32"),
    "mobilenet_v2": ({}, "mobilenet_v2:dtype=tf32"),
    "mobilenet_v3_large": ({}, "mobilenet_v3:dtype=tf32"),
    "efficientnet_b0": ({}, "efficientnet_b0:dtype=tf32"),
    "cosmoflow": ({}, "cosmoflow:dtype=tf32"),
    "unet3d": ({}, "unet3d:dtype=tf32"),
    "vit_b_16": ({}, "vit_b_16"),
    "swin_t": ({}, "swin_t"),
    "bert": ({}, "bert:head=mlm"),
    "gpt2": ({}, "gpt2:seq=512,batch=8,dtype=fp32"),
    "llama": ({"length": 2048}, "llama:seq=2048"),
    "mixtral": ({"layers": 2}, "moe:layers=2"),
    "transformer": ({}, "transformer"),
    "t5_small": ({}, "t5_small:dtype=fp32"),
    "rnnlm": ({}, "rnnlm"),
    "dlrm": ({}, "dlrm:tables=26,rows=200000,dim=64,bottom=512+256+64,top=1024+1024+512+1"),
}
# Devices, plan, and the axis that both models have to have so many parts along.
WAYS = (
    (1, "dp=1", ""),
    (8, "dp=8", ""),
    (4, "tp=4", "tp"),
    (4, "filter=4", "filter"),
    (4, "spatial=4", "height"),
    (2, "dp=2,ep=2", "ep"),
)


@dataclass(frozen=True)
class Row:
    """One model: how far the capture is from what is built in, relative."""

    model: str
    parameters: float
    flops: float
    steps: dict[str, float]  # by plan

    @property
    def worst(self) -> float:
        """The step that is farthest off."""
        return max(map(abs, self.steps.values()))


def report(truth: Path | None = None) -> dict[str, Any]:
    """Every model, as values and as text; nothing measured is needed."""
    rows = list(rows_of(MODELS))
    return {"rows": [asdict(r) for r in rows], "text": "\n".join(map(_line, rows))}


def rows_of(names: Any) -> Iterator[Row]:
    """The rows of some models."""
    for name in names:
        yield row(name, captured(name), load(MODELS[name][1]))


def captured(name: str) -> Workload:
    """The workload of a sample."""
    from foretell.pytorch.capture import capture
    from foretell_lab import samples

    return from_graph(capture(*getattr(samples, name)(**MODELS[name][0])))


def row(name: str, ours: Workload, known: Workload) -> Row:
    """One comparison."""
    steps = {}
    for gpus, text, axis in WAYS:
        if not axis or min(ours.most(axis), known.most(axis)) >= gpus:
            cluster = load_cluster(f"h200:gpus={gpus}")
            one, two = (predict(read(text), w, cluster).step for w in (ours, known))
            steps[text] = one / two - 1
    return Row(
        name, ours.parameters / known.parameters - 1, ours.flops() / known.flops() - 1, steps
    )


def _line(r: Row) -> str:
    steps = "  ".join(f"{plan} {off:+.1%}" for plan, off in r.steps.items())
    return f"{r.model:19} parameters {r.parameters:+.2%}  flop {r.flops:+.2%}  step: {steps}"
