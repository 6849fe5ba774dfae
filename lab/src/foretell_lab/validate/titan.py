"""Sharded, tensor, pipeline and context parallel runs in bf16 and fp8, predicted from one of them.

Tokens a second and device of Llama 3.1 under torchtitan on H100 of 500 W with 2.4 TB/s, 8 to 512 of
them (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, BSD-3; compiled, without
asynchronous tensor parallelism where both are given). No preset is that board: what it does to
kernels comes from the first row, by what `foretell fit` does; the others set nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from foretell.cluster import Calibration, load
from foretell.plan import Plan
from foretell.predict import predict
from foretell.predict.fit import Run, fit
from foretell.workload import load as workload

# Layers, hidden, heads, inner of Llama 3 (Grattafiori et al. 2024, table 3).
_SIZES = {
    "8b": (32, 4096, 32, 14336),
    "70b": (80, 8192, 64, 28672),
    "405b": (126, 16384, 128, 53248),
}
_SHARDED = "zero=3,recompute=selective,micro_batch=2"
_LONG = "recompute=full,dtype=fp8,micro_batch=1"
_WIDE = f"tp=8,pp=8,sp=yes,{_LONG}"
# Model, tokens of a sample, samples of a data-parallel rank, plan, tokens a second and device.
_ROWS: tuple[tuple[str, int, int, str, float], ...] = (
    ("8b", 8192, 2, f"dp=8,{_SHARDED}", 6667),
    ("8b", 8192, 2, f"dp=8,{_SHARDED},dtype=fp8", 8532),
    ("8b", 8192, 2, f"dp=128,{_SHARDED}", 6514),
    ("8b", 8192, 2, f"dp=128,{_SHARDED},dtype=fp8", 8380),
    ("8b", 32768, 1, f"dp=8,zero=3,{_LONG}", 3890),
    ("8b", 65536, 1, f"dp=4,cp=2,zero=3,{_LONG}", 2540),
    ("8b", 131072, 1, f"dp=2,cp=4,zero=3,{_LONG}", 1071),
    ("8b", 262144, 1, f"cp=8,{_LONG}", 548),
    ("70b", 8192, 16, "dp=32,tp=8,sp=yes,zero=3,recompute=full,dtype=fp8,micro_batch=16", 829),
    ("405b", 8192, 32, f"dp=8,zero=3,{_WIDE}", 100),
    ("405b", 32768, 8, f"dp=8,zero=3,{_WIDE}", 76),
    ("405b", 65536, 8, f"dp=4,cp=2,zero=3,{_WIDE}", 47),
    ("405b", 131072, 8, f"dp=2,cp=4,zero=3,{_WIDE}", 31),
    ("405b", 262144, 8, f"cp=8,{_WIDE}", 16),
)


@dataclass(frozen=True)
class Titan:
    """One run."""

    model: str
    plan: Plan
    tokens: int  # of a sample
    seconds: float  # of a step, measured

    def run(self, calibration: Calibration) -> Run:
        """What was asked for, on boards as slow as given."""
        layers, hidden, heads, inner = _SIZES[self.model]
        shape = f"layers={layers},hidden={hidden},heads={heads},groups=8,inner={inner}"
        model = workload(f"llama:{shape},vocab=128256,seq={self.tokens}")
        cluster = load(f"dgx-h100:nodes={max(self.plan.ranks // 8, 1)}").calibrated(calibration)
        return Run(model, cluster, self.plan, self.seconds)


def titans() -> Iterator[Titan]:
    """Every run."""
    for model, tokens, each, text, rate in _ROWS:
        plan = Plan.parse(f"{text},stack=fsdp")
        plan = plan.but(global_batch=each * plan.dp)
        yield Titan(model, plan, tokens, plan.global_batch * tokens / rate / plan.ranks)


@cache
def fitted() -> Calibration:
    """What the first run tells."""
    return fit([next(titans()).run(Calibration())]).calibration


def predicted() -> Iterator[tuple[str, float, float]]:
    """Name, measured and predicted seconds of every run but the first."""
    for titan in list(titans())[1:]:
        run = titan.run(fitted())
        name = f"{titan.model} {titan.tokens} tokens {titan.plan}"
        yield name, run.seconds, predict(run.plan, run.workload, run.cluster).step
