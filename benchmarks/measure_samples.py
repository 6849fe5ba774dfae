"""Run the sample models on this machine's GPU and write down what a step takes.

    python benchmarks/measure_samples.py -o measured.json [NAME...]

Un-profiled, by the clock over steps in a row and by CUDA events over single ones; with `--profiled`
the profiler has run once in the process before, which leaves launches slower. Needs torch alone.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from foretell_lab import samples

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "tf32": {"tf32": True},
    "amp_bf16": {"amp": True},
    "amp_bf16+foreach": {"amp": True, "kind": "foreach"},
    "amp_bf16+fused": {"amp": True, "kind": "fused"},
}
NAMES = ("resnet50", "vgg16", "mobilenet_v3_large", "gpt2", "bert", "swin_t")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--profiled", action="store_true")
    given = parser.parse_args()
    if given.profiled:
        _profile_something()
    rows = []
    for name in given.names or NAMES:
        for variant in given.variants:
            rows.append(measured(name, variant))
            print(rows[-1], flush=True)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    given.output.write_text(json.dumps({**about, "profiled": given.profiled, "rows": rows}))


def measured(name: str, variant: str) -> dict[str, Any]:
    """Step time and peak memory of one sample."""
    said = VARIANTS[variant]
    torch.backends.cuda.matmul.allow_tf32 = bool(said.get("tf32"))
    torch.backends.cudnn.allow_tf32 = bool(said.get("tf32"))
    step = _step(name, bool(said.get("amp")), said.get("kind", "loop"))
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    single = sorted(_single(step) for _ in range(10))
    began, count = time.perf_counter(), 15
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - began) / count
    peak = torch.cuda.max_memory_allocated()
    return {
        "model": name, "variant": variant, "median_s": single[5], "wall_s": wall, "peak_bytes": peak
    }  # fmt: skip


def _single(step: Callable[[], None]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    step()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) * 1e-3


def _step(name: str, amp: bool, kind: str) -> Callable[[], None]:
    sample = getattr(samples, name)()
    with torch.device("cuda"):
        model = sample.model()
        batch = tuple(_filled(t) for t in sample.batch())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = _optimizer(sample.optimizer, model, kind)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if amp else contextlib.nullcontext():
            if sample.loss is None:
                loss = model(*batch)
            else:
                loss = sample.loss(model(*batch[:-1]), batch[-1])
        loss.backward()
        optimizer.step()

    return step


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(tensor) if tensor.is_floating_point() else torch.zeros_like(tensor)


def _optimizer(text: str, model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"foreach": kind == "foreach"} if kind != "fused" else {"fused": True}
    if text.startswith("sgd"):
        return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, **options)
    return torch.optim.Adam(model.parameters(), lr=1e-6, **options)


def _profile_something() -> None:
    with torch.profiler.profile():
        torch.ones(8, device="cuda").sum().item()


if __name__ == "__main__":
    main()
