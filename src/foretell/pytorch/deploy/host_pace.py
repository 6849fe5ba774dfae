"""How fast the host here issues a step to its GPU, beside the host that prices are from.

Two machines of one kind differ by a quarter in it (→ cost/host.toml), and steps of small models are
bound by nothing else. So a small step of a transformer, captured and priced as any other, is taken
on the GPU: by as much as it takes longer than its price, the host is slower.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

from foretell.cluster.read import load
from foretell.plan import Plan
from foretell.predict import predict
from foretell.pytorch.capture import capture
from foretell.pytorch.deploy.precision import mixed
from foretell.pytorch.script import default_loss
from foretell.workload.captured import from_graph

Tensor = Any
_BLOCKS, _WIDE, _HEADS, _LONG = 4, 64, 4, 16  # too small for any GPU to be what takes time
_WARM, _STEPS = 8, 24
_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "bf16-mixed", "tf32": "tf32"}


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(_WIDE), nn.LayerNorm(_WIDE)
        self.q, self.k, self.v, self.out = (nn.Linear(_WIDE, _WIDE) for _ in range(4))
        self.up, self.down = nn.Linear(_WIDE, 4 * _WIDE), nn.Linear(4 * _WIDE, _WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        heads = (f(y).unflatten(-1, (_HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def _small() -> tuple[Any, Tensor]:
    """A model, and its batch: inputs and target in one."""
    return nn.Sequential(*(_Block() for _ in range(_BLOCKS))), torch.randn(1, _LONG, _WIDE)


def measured(word: str, device: str) -> float:
    """Seconds of the small step, its matmuls in a format."""
    with torch.random.fork_rng(devices=[]):
        model, x = (one.to(device) for one in _small())
    update, found = torch.optim.Adam(model.parameters()), list[float]()
    for _ in range(_WARM + _STEPS):
        _wait(device)
        start = time.perf_counter()
        update.zero_grad()
        with mixed(_short(word), device):
            loss = default_loss(model(x), x)
        loss.backward()
        update.step()
        _wait(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[_WARM:])


def priced(word: str, name: str) -> float:
    """The same as `predict` has it, on a device of this name."""
    with torch.random.fork_rng(devices=[]):
        model, x = _small()
    workload = from_graph(capture(model, (x, x), default_loss, None, on=name), "small step")
    plan = Plan(framework="ddp", precision=_PRECISIONS.get(word, "fp32"), optimizer="adam")
    return float(predict(plan, workload, load(f"{name}:gpus=1")).step)


def _short(word: str) -> str:
    return "bf16" if word == "fp8" else word


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
