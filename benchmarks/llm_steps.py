"""Whole training steps of language models on one GPU under sustained load, and their kernels.

    python benchmarks/llm_steps.py OUT.json [--part eager] [--part compiled] [--part kernels]

Needs torch and a CUDA device and nothing else. A board that is warm and at its power limit runs at
a lower clock than a cold one, so every reading lasts seconds; clock and power are sampled beside
it. Parts: kernels (GEMMs in bf16, fp8 and tf32 with random and zero data; causal attention), and
steps of GPT- and Llama-shaped models in several precisions, eager and compiled, with peak memory.
"""
# ruff: noqa: E501, E731, B023, C408

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import threading
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Sampler:
    """SM clock and board power, sampled while a reading runs."""

    def __init__(self) -> None:
        query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
        self.process = subprocess.Popen(
            ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "100"],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.rows: list[tuple[float, float, float, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                clock, power, heat = (float(v) for v in line.split(","))
            except ValueError:
                continue
            self.rows.append((time.time(), clock, power, heat))

    def between(self, begin: float, end: float) -> dict[str, float]:
        mine = [r for r in self.rows if begin <= r[0] <= end] or self.rows[-1:]
        return {
            "mhz": statistics.median(r[1] for r in mine),
            "watts": statistics.median(r[2] for r in mine),
            "celsius": mine[-1][3],
        }


def timed(run, seconds: float, sampler: Sampler, least: int = 10) -> dict[str, float]:
    """Run back to back for some seconds; the first tenth of a second and the last half of the time apart."""
    run()
    torch.cuda.synchronize()
    begin, cold, count = time.time(), 0.0, 0
    marks = []
    while time.time() - begin < seconds or count < least:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        count += 3
        marks.append((time.time() - begin, count))
        if not cold and marks[-1][0] > 0.1:
            cold = marks[-1][0] / count
    end = time.time()
    half = next(m for m in marks if m[0] >= marks[-1][0] / 2)
    rest = marks[-1][0] - half[0], marks[-1][1] - half[1]
    sustained = rest[0] / rest[1] if rest[1] else marks[-1][0] / marks[-1][1]
    return {
        "cold_s": cold or marks[-1][0] / marks[-1][1],
        "seconds": sustained,
        "count": count,
    } | sampler.between(begin + (end - begin) / 2, end)


def gemms(sampler: Sampler, quick: bool) -> list[dict]:
    rows = []
    shapes = [
        (8192, 4096, 4096),
        (16384, 14336, 4096),
        (16384, 4096, 14336),
        (8192, 8192, 8192),
        (4096, 2048, 2048),
        (16384, 50304, 2048),
    ]
    for m, n, k in shapes[: 2 if quick else None]:
        for data in ("random", "zero"):
            for dtype in ("bf16", "fp8", "tf32"):
                if data == "zero" and dtype != "bf16":
                    continue
                make = torch.randn if data == "random" else torch.zeros
                a, b = (make(s, device="cuda") for s in ((m, k), (n, k)))
                if dtype == "bf16":
                    a, b = a.bfloat16(), b.bfloat16()
                    run = lambda: F.linear(a, b)
                elif dtype == "tf32":
                    torch.backends.cuda.matmul.allow_tf32 = True
                    run = lambda: F.linear(a, b)
                else:
                    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
                    one = torch.tensor(1.0, device="cuda")
                    run = lambda: torch._scaled_mm(
                        a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
                    )
                torch.cuda.synchronize()
                time.sleep(0.5)
                try:
                    rows.append(
                        {"part": "gemm", "m": m, "n": n, "k": k, "dtype": dtype, "data": data}
                        | timed(run, 2.5, sampler)
                    )
                except RuntimeError as error:
                    rows.append(
                        {
                            "part": "gemm",
                            "m": m,
                            "n": n,
                            "k": k,
                            "dtype": dtype,
                            "error": str(error)[:120],
                        }
                    )
                torch.backends.cuda.matmul.allow_tf32 = False
    return rows


def attentions(sampler: Sampler, quick: bool) -> list[dict]:
    rows = []
    shapes = [
        (8, 16, 2048, 128),
        (4, 32, 4096, 128),
        (2, 32, 8192, 128),
        (1, 32, 32768, 128),
        (16, 16, 1024, 64),
        (8, 32, 2048, 64),
    ]
    for b, h, s, d in shapes[: 1 if quick else None]:
        q, k, v = (
            torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        with torch.no_grad():
            rows.append(
                {"part": "attention", "b": b, "heads": h, "seq": s, "d": d, "way": "forward"}
                | timed(
                    lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 1.5, sampler
                )
            )
        g = torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16)

        def both():
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(g)
            q.grad = k.grad = v.grad = None

        rows.append(
            {"part": "attention", "b": b, "heads": h, "seq": s, "d": d, "way": "both"}
            | timed(both, 1.5, sampler)
        )
    return rows


class GPTBlock(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        b, s, c = x.shape
        q, k, v = (
            self.qkv(self.ln1(x)).view(b, s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, c)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, seq: int, vocab: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(GPTBlock(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(
            x.dtype
        ) * self.weight


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


class LlamaBlock(nn.Module):
    def __init__(
        self, hidden: int, heads: int, groups: int, inner: int, norm: type[nn.Module]
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.d = heads, groups, hidden // heads
        self.n1, self.n2 = norm(hidden), norm(hidden)
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(hidden, groups * self.d, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x, cos, sin):
        b, s, c = x.shape
        h = self.n1(x)
        q = rotate(self.q(h).view(b, s, self.heads, self.d).transpose(1, 2), cos, sin)
        k = rotate(self.k(h).view(b, s, self.groups, self.d).transpose(1, 2), cos, sin)
        v = self.v(h).view(b, s, self.groups, self.d).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.groups != self.heads
        )
        x = x + self.o(y.transpose(1, 2).reshape(b, s, c))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        groups: int,
        inner: int,
        seq: int,
        vocab: int,
        native: bool = False,
    ) -> None:
        super().__init__()
        norm = nn.RMSNorm if native else RMSNorm
        self.words = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(
            LlamaBlock(hidden, heads, groups, inner, norm) for _ in range(layers)
        )
        self.norm, self.head = norm(hidden), nn.Linear(hidden, vocab, bias=False)
        d = hidden // heads
        angles = torch.outer(
            torch.arange(seq).float(), 10000 ** (-torch.arange(0, d, 2).float() / d)
        )
        both = torch.cat((angles, angles), -1)
        self.register_buffer("cos", both.cos())
        self.register_buffer("sin", both.sin())

    def forward(self, ids):
        x = self.words(ids)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


SHAPES = {
    "gpt-125m": ("gpt", dict(layers=12, hidden=768, heads=12, seq=1024, vocab=50304)),
    "gpt-350m": ("gpt", dict(layers=24, hidden=1024, heads=16, seq=1024, vocab=50304)),
    "gpt-760m": ("gpt", dict(layers=24, hidden=1536, heads=16, seq=2048, vocab=50304)),
    "gpt-1.3b": ("gpt", dict(layers=24, hidden=2048, heads=16, seq=2048, vocab=50304)),
    "gpt-2.7b": ("gpt", dict(layers=32, hidden=2560, heads=32, seq=2048, vocab=50304)),
    "gpt-1.3b-50257": ("gpt", dict(layers=24, hidden=2048, heads=32, seq=2048, vocab=50257)),
    "llama-0.5b": (
        "llama",
        dict(layers=24, hidden=1024, heads=16, groups=8, inner=4096, seq=2048, vocab=32000),
    ),
    "llama-1b": (
        "llama",
        dict(layers=16, hidden=2048, heads=32, groups=8, inner=8192, seq=4096, vocab=128256),
    ),
    "llama-1.1b": (
        "llama",
        dict(layers=22, hidden=2048, heads=32, groups=4, inner=5632, seq=2048, vocab=32000),
    ),
    "llama-3b": (
        "llama",
        dict(layers=28, hidden=3072, heads=24, groups=8, inner=8192, seq=2048, vocab=128256),
    ),
    "llama-1.5b-8k": (
        "llama",
        dict(layers=16, hidden=2560, heads=20, groups=20, inner=6912, seq=8192, vocab=32000),
    ),
}
for _name in ("llama-0.5b", "llama-1b", "llama-1.1b", "llama-3b"):
    SHAPES[f"{_name}-native"] = ("llama", SHAPES[_name][1] | {"native": True})
for _name in ("llama-1b", "llama-1.1b", "llama-3b"):
    SHAPES[f"{_name}-hf"] = ("hf-llama", SHAPES[_name][1])
SHAPES["gpt2-large-hf"] = ("hf-gpt2", dict(layers=36, hidden=1280, heads=20, seq=1024, vocab=50257))
# shape, precision, compiled, micro-batch, optimizer
STEPS = [
    ("gpt-125m", "bf16-mixed", False, 8, "adamw"), ("gpt-125m", "bf16-mixed", False, 32, "adamw"), ("gpt-125m", "bf16-true", False, 16, "adamw"),
    ("gpt-125m", "fp32", False, 8, "adamw"), ("gpt-125m", "tf32", False, 16, "adamw-fused"), ("gpt-125m", "bf16-mixed", True, 16, "adamw-fused"),
    ("gpt-350m", "bf16-mixed", False, 8, "adamw"), ("gpt-350m", "bf16-true", False, 16, "adamw"), ("gpt-350m", "bf16-mixed", True, 16, "adamw"),
    ("gpt-760m", "bf16-mixed", False, 8, "adamw"), ("gpt-760m", "bf16-true", False, 8, "adamw-fused"), ("gpt-760m", "bf16-true", True, 8, "adamw"),
    ("gpt-1.3b", "bf16-mixed", False, 4, "adamw"), ("gpt-1.3b", "bf16-mixed", False, 8, "adamw"), ("gpt-1.3b", "bf16-true", False, 2, "adamw"),
    ("gpt-1.3b", "bf16-true", False, 8, "adamw"), ("gpt-1.3b", "bf16-true", True, 8, "adamw"), ("gpt-1.3b", "bf16-mixed", True, 8, "adamw"), ("gpt-1.3b", "tf32", False, 4, "adamw"),
    ("gpt-2.7b", "bf16-mixed", False, 4, "adamw"), ("gpt-2.7b", "bf16-true", False, 4, "adamw"), ("gpt-2.7b", "bf16-true", False, 8, "sgd"),
    ("gpt-1.3b-50257", "bf16-mixed", False, 8, "adamw"),
    ("llama-0.5b", "bf16-mixed", False, 8, "adamw"), ("llama-0.5b", "bf16-true", False, 16, "adamw"),
    ("llama-1b", "bf16-mixed", False, 4, "adamw"), ("llama-1b", "bf16-true", False, 4, "adamw"), ("llama-1b", "bf16-true", True, 4, "adamw"),
    ("llama-1.1b", "bf16-mixed", False, 8, "adamw"), ("llama-1.1b", "bf16-true", False, 8, "adamw"), ("llama-1.1b", "bf16-true", False, 1, "adamw"),
    ("llama-1.1b", "bf16-mixed", True, 8, "adamw-fused"), ("llama-1.1b", "fp32", False, 2, "adamw"),
    ("llama-3b", "bf16-true", False, 4, "adamw"), ("llama-3b", "bf16-mixed", False, 4, "adamw"), ("llama-3b", "bf16-true", True, 4, "adamw"),
    ("llama-1.5b-8k", "bf16-true", False, 2, "adamw"), ("llama-1.5b-8k", "bf16-mixed", False, 2, "adamw"),
    ("llama-0.5b-native", "bf16-true", False, 16, "adamw"), ("llama-1b-native", "bf16-true", False, 4, "adamw"), ("llama-1b-native", "bf16-mixed", False, 4, "adamw"),
    ("llama-1.1b-native", "bf16-true", False, 8, "adamw"), ("llama-1.1b-native", "bf16-mixed", False, 8, "adamw"), ("llama-1.1b-native", "bf16-true", False, 2, "adamw-fused"),
    ("llama-3b-native", "bf16-true", False, 4, "adamw"), ("llama-3b-native", "bf16-mixed", False, 2, "adamw"), ("llama-3b-native", "bf16-true", False, 8, "adamw-fused"),
    ("llama-1.1b-hf", "bf16-true", False, 8, "adamw"), ("llama-1b-hf", "bf16-true", False, 4, "adamw"), ("llama-1.1b-hf", "bf16-mixed", False, 4, "adamw"), ("llama-3b-hf", "bf16-true", False, 4, "adamw"),
    ("gpt2-large-hf", "bf16-mixed", False, 8, "adamw"), ("gpt2-large-hf", "bf16-true", False, 8, "adamw"),
    ("gpt-350m", "fp16-mixed", False, 8, "adamw"), ("gpt-1.3b", "fp16-mixed", False, 4, "adamw"), ("llama-1.1b-native", "bf16-true", True, 8, "adamw"),
]  # fmt: skip


def hugging(kind: str, shape: dict) -> nn.Module:
    """The same shapes as transformers builds them."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    if kind == "hf-gpt2":
        config = GPT2Config(
            vocab_size=shape["vocab"],
            n_positions=shape["seq"],
            n_embd=shape["hidden"],
            n_layer=shape["layers"],
            n_head=shape["heads"],
        )
    else:
        config = LlamaConfig(
            vocab_size=shape["vocab"],
            hidden_size=shape["hidden"],
            intermediate_size=shape["inner"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["groups"],
            max_position_embeddings=shape["seq"],
        )
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids).logits

    return Logits().train()


def step(
    name: str, precision: str, compiled: bool, batch: int, optimizer: str, sampler: Sampler
) -> dict:
    kind, shape = SHAPES[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = (
            hugging(kind, shape)
            if kind.startswith("hf")
            else (GPT if kind == "gpt" else Llama)(**shape)
        )
    if precision == "bf16-true":
        model = model.bfloat16()
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    ids = torch.randint(shape["vocab"], (batch, shape["seq"]), device="cuda")
    want = torch.randint(shape["vocab"], (batch, shape["seq"]), device="cuda")
    if optimizer == "sgd":
        update = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    else:
        update = torch.optim.AdamW(
            model.parameters(), 1e-4, **({"fused": True} if optimizer.endswith("fused") else {})
        )
    run = torch.compile(model) if compiled else model
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16-mixed")
    narrow = torch.float16 if precision == "fp16-mixed" else torch.bfloat16

    def one():
        with torch.autocast("cuda", narrow, enabled=precision.endswith("mixed")):
            loss = F.cross_entropy(run(ids).flatten(0, 1), want.flatten())
        scaler.scale(loss).backward()
        scaler.step(update)
        scaler.update()
        update.zero_grad(set_to_none=True)

    for _ in range(3):
        one()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found = timed(one, 5.0, sampler)
    found["peak_bytes"] = torch.cuda.max_memory_allocated()
    found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    found["parameters"] = sum(p.numel() for p in model.parameters())
    options = {
        "part": "step",
        "model": name,
        "kind": kind,
        **shape,
        "precision": precision,
        "compiled": compiled,
        "batch": batch,
        "optimizer": optimizer,
    }
    return options | found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=("eager", "compiled", "kernels"), action="append")
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="stop starting new readings after so many"
    )
    parser.add_argument("--skip", type=int, default=0, help="steps left out at the beginning")
    given = parser.parse_args()
    began, sampler, rows = time.time(), Sampler(), []
    time.sleep(0.5)

    def keep(more: list[dict]) -> None:
        rows.extend(more)
        with open(given.out, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows},
                file,
                indent=0,
            )

    parts = given.part or ["eager", "compiled", "kernels"]
    order = [s for s in STEPS if ("compiled" if s[2] else "eager") in parts][given.skip :]
    for options in order[:: 12 if given.quick else 1]:
        if time.time() - began > given.seconds:
            print("left out:", options)
            continue
        try:
            keep([step(*options, sampler)])
            row = rows[-1]
            print(
                options,
                f"{1e3 * row['seconds']:.2f} ms (cold {1e3 * row['cold_s']:.2f}) {row['mhz']:.0f} MHz {row['watts']:.0f} W {row['peak_bytes'] / 2**30:.2f} GiB",
                flush=True,
            )
        except Exception as error:
            print(options, "failed:", type(error).__name__, str(error)[:200], flush=True)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    if "kernels" in parts:
        keep(gemms(sampler, given.quick))
        keep(attentions(sampler, given.quick))
    for row in rows:
        if row["part"] != "step" and "seconds" in row:
            print({k: v for k, v in row.items() if k not in ("count", "celsius")}, flush=True)


if __name__ == "__main__":
    main()
