"""Predicted beside measured on this machine, for models that no calibration has seen.

    python benchmarks/predicted_runs.py [-o FOLDER] [--ranks 2|4] [--resume] [--no-run]

One model is run first, which teaches the machine's factors (`foretell run` keeps them); then every
other model is run under every plan, from the factors of that one run: what runs of the others teach
is thrown away. Every step has a batch of its own: one that is taken again and again is learnt by
heart, and its gradients become denormal numbers, which are slow. No step of a
plan is taken before it is predicted. The last lines say how far predictions were
off, how far with the load that there was during the steps, how many intervals held, and for how
many models the plan predicted to be the fastest was, or was within 5 % of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

STEPS, WARMUP = 60, 3
SAME = 0.05  # of a step: plans that are as fast as each other
TAUGHT = ("mlp", "dp={n}")
PLANS = {
    2: ("dp=2", "dp=2,zero=3", "dp=2,overlap=false", "pp=2,micro_batch={quarter}"),
    4: ("dp=4", "dp=4,zero=3", "dp=2,pp=2,micro_batch={quarter}"),
}
MORE = {  # of models whose layers, tokens, experts or images are split
    2: (("blocks", "tp=2"), ("blocks", "cp=2"), ("blocks", "tp=2,sp=yes"),
        ("experts", "dp=2,ep=2"), ("images", "spatial=2")),
    4: (("blocks", "dp=2,tp=2"), ("blocks", "tp=2,cp=2"), ("experts", "dp=4,ep=2")),
}  # fmt: skip
HEAD = """import torch
from torch import nn

SAMPLES = {samples}


def batch(rank, size, step):
    draw = torch.Generator().manual_seed(step)
    x = {x}
    y = torch.randint(0, 10, (SAMPLES,), generator=draw)
    return (x.chunk(size)[rank],), y.chunk(size)[rank]


"""
FLOATS = "torch.randn(SAMPLES, *{shape}, generator=draw)"
WORDS = "torch.randint(0, 500, (SAMPLES, {length}), generator=draw)"
BODIES = {  # samples, inputs, model: `model()` is written out
    "mlp": (256, FLOATS.format(shape="(512,)"), """
def model():
    layers = [m for _ in range(8) for m in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 10))
"""),
    "wide": (64, FLOATS.format(shape="(1024,)"), """
def model():
    layers = [m for _ in range(3) for m in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10))
"""),
    "images": (32, FLOATS.format(shape="(3, 32, 32)"), """
def model():
    sizes = ((3, 32), (32, 64), (64, 128))
    body = [
        part
        for a, b in sizes
        for part in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(2048, 10))
"""),
    "words": (16, WORDS.format(length=64), """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LayerNorm(128), nn.LayerNorm(128)
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, 4, c // 4).transpose(1, 2) for y in self.qkv(self.a(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(nn.functional.gelu(self.up(self.b(x))))


class Pooled(nn.Module):
    def forward(self, x):
        return x.mean(1)


def model():
    blocks = [Block() for _ in range(4)]
    return nn.Sequential(nn.Embedding(500, 128), *blocks, Pooled(), nn.Linear(128, 10))
"""),
    "deep": (64, FLOATS.format(shape="(128,)"), """
class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model():
    return nn.Sequential(*[Residual() for _ in range(12)], nn.Linear(128, 10))
"""),
    "blocks": (16, WORDS.format(length=64), """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LayerNorm(128), nn.LayerNorm(128)
        self.q, self.k, self.v, self.out = (nn.Linear(128, 128) for _ in range(4))
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        b, t, c = x.shape
        y = self.a(x)
        q, k, v = (f(y).view(b, t, 4, c // 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(nn.functional.gelu(self.up(self.b(x))))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(500, 128)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def model():
    return Words()
"""),
    "experts": (256, FLOATS.format(shape="(32,)"), """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(0.05 * torch.randn(4, 64, 256))
        self.down = nn.Parameter(0.05 * torch.randn(4, 256, 64))

    def forward(self, tokens, index, weights):
        out = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            at, k = (index == expert).nonzero(as_tuple=True)
            made = nn.functional.gelu(tokens[at] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, at, made * weights[at, k, None])
        return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(64, 4), Experts()

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


def model():
    return nn.Sequential(nn.Linear(32, 64), *[Mixture() for _ in range(3)], nn.Linear(64, 10))
"""),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/measured/runs"))
    parser.add_argument("--ranks", type=int, choices=sorted(PLANS), default=2)
    parser.add_argument("--resume", action="store_true", help="leave out what the file has")
    parser.add_argument("--no-run", action="store_true", help="the table of what was measured")
    options = parser.parse_args()
    path = options.output / f"ranks_{options.ranks}.json"
    if not options.no_run:
        options.output.mkdir(parents=True, exist_ok=True)
        measure(options.ranks, path, is_resumed=options.resume)
    show(json.loads(path.read_text()))


def measure(ranks: int, path: Path, *, is_resumed: bool = False) -> None:
    """The run that teaches, then all others, each from what it taught; kept after each."""
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if is_resumed else []
    there = {(row["model"], row["plan"]) for row in rows}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        taught, plan = TAUGHT
        _run(folder, taught, plan.format(n=ranks), folder / "cache")
        for model, text in _cases(ranks):
            plan = text.format(quarter=max(BODIES[model][0] // ranks // 4, 1))
            if (model, plan) in there:
                continue
            cache = folder / "used"
            shutil.rmtree(cache, ignore_errors=True)
            shutil.copytree(folder / "cache", cache)
            found = _run(folder, model, plan, cache)
            if found is not None:
                rows.append({"model": model, "plan": plan} | found)
            path.write_text(json.dumps(rows, indent=1) + "\n")


def _cases(ranks: int) -> list[tuple[str, str]]:
    split = {model for model, _ in MORE[ranks]} - {"images"}
    models = [name for name in BODIES if name != TAUGHT[0] and name not in split]
    return [(model, text) for model in models for text in PLANS[ranks]] + [*MORE[ranks]]


def _run(folder: Path, model: str, plan: str, cache: Path) -> dict[str, Any] | None:
    """What was predicted and measured of one plan."""
    samples, x, body = BODIES[model]
    script = folder / f"{model}.py"
    script.write_text(HEAD.format(samples=samples, x=x) + body.lstrip("\n"))
    line = [sys.executable, "-m", "foretell", "run", str(script), "--plan", plan, "--json", "-q"]
    line += ["--steps", str(STEPS), "--warmup", str(WARMUP), "--device", "cpu", "--no-verify"]
    done = subprocess.run(
        line, env=os.environ | {"XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True
    )
    if done.returncode:
        print(f"{model} {plan}: {done.stderr.strip()}", file=sys.stderr)
        return None
    found = json.loads(done.stdout)
    answer = found["prediction"]
    if answer is None or "why" in answer:
        print(f"{model} {plan}: no prediction: {(answer or {}).get('why')}", file=sys.stderr)
        return None
    keys = ("low_s", "high_s", "load", "load_during", "waits_s", "breakdown", "first_apart")
    row = {key: answer.get(key) for key in keys}
    row |= {"predicted_s": found["predicted_s"], "measured_s": found["step_s"]}
    print(_line({"model": model, "plan": plan} | row), flush=True)
    return row


def _line(row: dict[str, Any]) -> str:
    off = row["predicted_s"] / row["measured_s"] - 1
    held = "in" if row["low_s"] <= row["measured_s"] <= row["high_s"] else "out"
    return (
        f"{row['model']:8} {row['plan']:26} measured {1e3 * row['measured_s']:8.1f} ms  predicted "
        f"{1e3 * row['predicted_s']:8.1f} ms ({off:+5.0%}, {held:3}) load {row['load']:.1f} before"
        f", {row['load_during']:.1f} during"
    )


def show(rows: list[dict[str, Any]]) -> None:
    """The table and what it comes to."""
    for row in rows:
        print(_line(row))
    off = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    then = [
        abs(row["predicted_s"] * row["load_during"] / row["load"] / row["measured_s"] - 1)
        for row in rows
    ]
    held = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows]
    print(
        f"{len(rows)} runs: mean |error| {mean(off):.0%}, median {median(off):.0%}; with the load "
        f"in the steps {mean(then):.0%}, {median(then):.0%}; 80 % interval held {mean(held):.0%}"
    )
    models = [m for m in BODIES if sum(row["model"] == m for row in rows) > 1]
    picked = [_is_picked([r for r in rows if r["model"] == m]) for m in models]
    print(f"best plan picked for {sum(picked)} of {len(picked)} models")


def _is_picked(rows: list[dict[str, Any]]) -> bool:
    chosen = min(rows, key=lambda row: row["predicted_s"])
    best = min(row["measured_s"] for row in rows)
    return bool(chosen["measured_s"] <= (1 + SAME) * best)


if __name__ == "__main__":
    main()
