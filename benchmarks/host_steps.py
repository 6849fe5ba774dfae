"""Host time of small training steps by phase, run-to-run spread, and peaks of a clean process.

    python benchmarks/host_steps.py OUT.json [PART ...]

Needs torch with CUDA, torchvision and transformers; weights are random. Parts:

    host      host seconds of forward, backward and update of steps too small to fill the device
    repeat    the same what-ifs of one model again and again: how far one run differs from the next
    memory    peak memory with nothing left over from runs before (cuBLAS workspaces given back)
    count     kernels and device seconds of the steps of `host`
"""
# ruff: noqa: E501

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS: list[dict] = []
OUT = sys.argv[1]
STARTED = time.time()


def cpu() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def add(part: str, row: dict) -> None:
    """One more row; the file is written anew each time, so that a run cut short is not lost."""
    ROWS.append({"part": part} | row)
    about = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cpu": cpu(), "cores": os.cpu_count(),
        "source": "benchmarks/host_steps.py",
    }  # fmt: skip
    with open(OUT, "w") as file:
        json.dump(about | {"rows": ROWS}, file)
    print(round(time.time() - STARTED), json.dumps(ROWS[-1])[:240], flush=True)


# ---------------------------------------------------------------- models


def image(name: str, batch: int, classes: int = 1000):
    import torchvision

    model = torchvision.models.get_model(
        name, weights=None, **({"init_weights": False} if name == "inception_v3" else {})
    ).cuda()
    side = 299 if name == "inception_v3" else 224
    x, y = (
        torch.randn(batch, 3, side, side, device="cuda"),
        torch.randint(classes, (batch,), device="cuda"),
    )

    def loss(x=x):
        out = model(x)
        return F.cross_entropy(out if torch.is_tensor(out) else out[0], y)

    return model, loss, x


def words(name: str, batch: int, seq: int):
    import transformers as t

    if name == "gpt2":
        model = t.GPT2LMHeadModel(t.GPT2Config(use_cache=False, n_positions=1024))
    elif name == "gpt2_medium":
        model = t.GPT2LMHeadModel(t.GPT2Config(use_cache=False, n_embd=1024, n_layer=24, n_head=16))
    elif name == "bert_base":
        model = t.BertForMaskedLM(t.BertConfig())
    elif name == "distilbert":
        model = t.DistilBertForMaskedLM(t.DistilBertConfig())
    elif name == "t5_small":
        model = t.T5ForConditionalGeneration(t.T5Config(use_cache=False, decoder_start_token_id=0))
    elif name == "llama_110m":
        model = t.LlamaForCausalLM(t.LlamaConfig(
            hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4, vocab_size=32000, use_cache=False))  # fmt: skip
    else:
        raise ValueError(name)
    model = model.cuda()
    ids = torch.randint(0, 30000, (batch, seq), device="cuda")
    return model, lambda x=ids: model(input_ids=x, labels=x).loss, ids


class Recurrent(nn.Module):
    """A two-layer LSTM language model."""

    def __init__(self, vocabulary: int = 33278, hidden: int = 650) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, 2, batch_first=True, dropout=0.2)
        self.out = nn.Linear(hidden, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(x))
        return F.cross_entropy(self.out(hidden).flatten(0, 1), x.flatten())


def recurrent(batch: int, seq: int):
    model = Recurrent().cuda()
    ids = torch.randint(0, 30000, (batch, seq), device="cuda")
    return model, lambda x=ids: model(x), ids


# Name: how to make it, its optimizer.
SMALL: dict[str, tuple[Any, str]] = {
    "resnet50": (lambda: image("resnet50", 4), "sgd"),
    "mobilenet_v2": (lambda: image("mobilenet_v2", 4), "sgd"),
    "vit_b_16": (lambda: image("vit_b_16", 2), "adamw"),
    "bert_base": (lambda: words("bert_base", 2, 64), "adamw"),
    "densenet121": (lambda: image("densenet121", 4), "sgd"),
    "gpt2": (lambda: words("gpt2", 1, 128), "adamw"),
    "vgg16": (lambda: image("vgg16", 2), "sgd"),
    "t5_small": (lambda: words("t5_small", 2, 64), "adamw"),
    "resnet18": (lambda: image("resnet18", 4), "sgd"),
    "efficientnet_b0": (lambda: image("efficientnet_b0", 4), "sgd"),
    "swin_t": (lambda: image("swin_t", 2), "adamw"),
    "convnext_tiny": (lambda: image("convnext_tiny", 2), "adamw"),
    "llama_110m": (lambda: words("llama_110m", 1, 128), "adamw"),
    "distilbert": (lambda: words("distilbert", 2, 64), "adamw"),
    "regnet_y_800mf": (lambda: image("regnet_y_800mf", 4), "sgd"),
    "shufflenet_v2_x1_0": (lambda: image("shufflenet_v2_x1_0", 4), "sgd"),
    "inception_v3": (lambda: image("inception_v3", 4), "sgd"),
    "rnnlm": (lambda: recurrent(8, 16), "adamw"),
}
WAYS = (
    "fp32 foreach",
    "bf16-mixed foreach",
    "fp16-mixed foreach",
    "fp32 loop",
    "fp32 fused",
    "bf16-mixed fused",
    "fp32 foreach nhwc",
)


def optimizer_of(model: nn.Module, kind: str, how: str, graph: bool = False):
    said: dict[str, Any] = {"fused": True} if how == "fused" else {"foreach": how == "foreach"}
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, **said)
    return torch.optim.AdamW(model.parameters(), lr=1e-5, capturable=graph, **said)


class Step:
    """One training step that notes when the host was done with each phase."""

    def __init__(self, loss, optimizer, precision: str) -> None:
        self.loss, self.optimizer = loss, optimizer
        self.dtype = torch.float16 if "fp16" in precision else torch.bfloat16
        self.mixed = "mixed" in precision
        self.scaler = torch.amp.GradScaler("cuda", enabled="fp16-mixed" in precision)
        self.marks: list[tuple[float, ...]] = []
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
            precision == "tf32"
        )

    def __call__(self) -> None:
        clock = time.perf_counter
        t0 = clock()
        self.optimizer.zero_grad(set_to_none=True)
        t1 = clock()
        with torch.autocast("cuda", self.dtype, enabled=self.mixed):
            loss = self.loss()
        t2 = clock()
        self.scaler.scale(loss).backward()
        t3 = clock()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        t4 = clock()
        self.marks.append((t1 - t0, t2 - t1, t3 - t2, t4 - t3))


def walled(step, steps: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


def evented(step, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        step()
        b.record()
        torch.cuda.synchronize()
        found.append(a.elapsed_time(b) / 1e3)
    return found


def clean() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def host(seconds: float) -> None:
    """Each model in each way; a second round of the first ways tells the spread of runs."""
    begin = time.time()
    for round_, ways in enumerate((WAYS, WAYS[:2])):
        for name in SMALL:
            if time.time() - begin > seconds:
                return
            clean()
            small(name, ways, round_)


def small(name: str, ways: tuple[str, ...], round_: int) -> None:
    """Host seconds by phase of one model in some ways."""
    make, kind = SMALL[name]
    torch.manual_seed(0)
    model, loss, x = make()
    model.train()
    for way in ways:
        precision, how, *last = way.split()
        if last and x.dim() != 4:
            continue
        if last:
            model.to(memory_format=torch.channels_last)
        given = x.to(memory_format=torch.channels_last) if last else x
        step = Step(partial(loss, given), optimizer_of(model, kind, how), precision)
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step.marks.clear()
        wall = walled(step, 20)
        marks = [statistics.median(column) for column in zip(*step.marks, strict=True)]
        single = statistics.median(evented(step, 8))
        add("host", {
            "model": name, "way": way, "round": round_, "optimizer": kind, "batch": x.shape[0], "seq": x.shape[1] if x.dim() == 2 else 0,
            "tensors": sum(1 for _ in model.parameters()), "wall_s": wall, "event_s": single, "zero_s": marks[0], "forward_s": marks[1],
            "backward_s": marks[2], "update_s": marks[3], "peak_bytes": torch.cuda.max_memory_allocated(),
        })  # fmt: skip
        model.zero_grad(set_to_none=True)


def count_kernels() -> None:
    """Kernels and device seconds of the same small steps; last, as profiling slows what follows."""
    from torch.profiler import ProfilerActivity, profile

    for name, (make, kind) in SMALL.items():
        clean()
        model, loss, _ = make()
        model.train()
        for way in ("fp32 foreach", "bf16-mixed foreach"):
            step = Step(loss, optimizer_of(model, kind, "foreach"), way.split()[0])
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                step()
                torch.cuda.synchronize()
            mine = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            add(
                "count",
                {
                    "model": name,
                    "way": way,
                    "kernels": len(mine),
                    "device_s": sum(e.device_time for e in mine) * 1e-6,
                },
            )


# ---------------------------------------------------------------- repeats

AGAIN = {
    "densenet121": (lambda times: image("densenet121", int(64 * times)), "sgd"),
    "swin_t": (lambda times: image("swin_t", int(64 * times)), "adamw"),
}
CHANGES = ("base", "tf32", "amp_bf16", "amp_fp16", "batch_half", "opt_fused", "amp_bf16+fused")


def repeat(rounds: int = 2) -> None:
    for round_ in range(rounds):
        for name, (make, kind) in AGAIN.items():
            for change in CHANGES:
                clean()
                torch.manual_seed(0)
                model, loss, x = make(0.5 if "half" in change else 1)
                model.train()
                precision = (
                    "tf32"
                    if change == "tf32"
                    else "fp16-mixed"
                    if "fp16" in change
                    else "bf16-mixed"
                    if "bf16" in change
                    else "fp32"
                )
                step = Step(
                    loss,
                    optimizer_of(model, kind, "fused" if "fused" in change else "loop"),
                    precision,
                )
                for _ in range(4):
                    step()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                singles = evented(step, 9)
                step.marks.clear()
                wall = walled(step, 9)
                marks = [statistics.median(column) for column in zip(*step.marks, strict=True)]
                add("repeat", {"model": name, "variant": change, "round": round_, "batch": x.shape[0], "median_ms": 1e3 * statistics.median(singles),
                               "wall_ms": 1e3 * wall, "host_ms": [1e3 * m for m in marks], "peak_mib": torch.cuda.max_memory_allocated() / 2**20})  # fmt: skip
                del model, loss, x, step


# ---------------------------------------------------------------- memory

LARGE: dict[str, tuple[Any, str]] = {
    "resnet50": (lambda: image("resnet50", 64), "sgd"),
    "resnet152": (lambda: image("resnet152", 32), "sgd"),
    "vgg16": (lambda: image("vgg16", 64), "sgd"),
    "densenet121": (lambda: image("densenet121", 64), "sgd"),
    "efficientnet_b0": (lambda: image("efficientnet_b0", 64), "sgd"),
    "mobilenet_v3_large": (lambda: image("mobilenet_v3_large", 128), "sgd"),
    "vit_b_16": (lambda: image("vit_b_16", 64), "adamw"),
    "swin_t": (lambda: image("swin_t", 64), "adamw"),
    "convnext_tiny": (lambda: image("convnext_tiny", 64), "adamw"),
    "gpt2": (lambda: words("gpt2", 8, 512), "adamw"),
    "bert_base": (lambda: words("bert_base", 32, 128), "adamw"),
}


def captured(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def memory() -> None:
    for name in LARGE:
        for change in ("base", "amp_bf16", "checkpoint"):
            clean()
            peak(name, change)
    for change in ("base", "graph", "after the graph", "workspaces given back"):
        if change != "after the graph":
            clean()
        peak("resnet50", change)


def peak(name: str, change: str) -> None:
    """The most a step holds, and what the allocator has."""
    make, kind = LARGE[name]
    torch.manual_seed(0)
    model, loss, x = make()
    model.train()
    if change == "checkpoint":
        loss = partial(checkpoint, loss, x, use_reentrant=False)
    step = Step(
        loss,
        optimizer_of(model, kind, "loop", change == "graph"),
        "bf16-mixed" if "amp" in change else "fp32",
    )
    run = captured(step) if change == "graph" else step
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    add("memory", {"model": name, "variant": change, "batch": x.shape[0], "peak_mib": torch.cuda.max_memory_allocated() / 2**20,
                   "reserved_mib": torch.cuda.max_memory_reserved() / 2**20})  # fmt: skip


PARTS = {"host": lambda: host(200), "memory": memory, "repeat": repeat, "count": count_kernels}

if __name__ == "__main__":
    for part in sys.argv[2:] or list(PARTS):
        try:
            PARTS[part]()
        except Exception as error:
            add("failed", {"what": part, "error": f"{type(error).__name__}: {error}"[:300]})
