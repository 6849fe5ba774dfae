"""Whole steps of networks of images and encoders, and the parts of steps that formulas need, on one GPU.

    python benchmarks/training_parts.py OUT.json [PART ...]

Needs torch, torchvision, transformers, triton and a CUDA device. Parts:

    vision    steps in fp32, tf32 and under autocast, both memory formats, two batch sizes
    fp8       a linear layer forward and backward in bf16 and fp8 (tensor-wise and row-wise scales)
    experts   a layer of experts over torch._grouped_mm, eager and compiled, bf16 and fp8
    attention FlashAttention-2 and cuDNN, causal and not, several lengths
    contend   matmuls and attention beside a kernel that copies memory on some SMs, as NCCL's do
    sharded   the copies FSDP2 makes around its collectives
"""
# ruff: noqa: E501, E731, B023

from __future__ import annotations

import gc
import json
import os
import sys
import time

import torch
import torch.nn.functional as F
from llm_steps import Sampler, timed
from torch.profiler import ProfilerActivity, profile

ROWS: list[dict] = []
OUT = sys.argv[1]
STARTED = time.time()


def add(part: str, row: dict) -> None:
    """One more row; the file is written anew each time, so that a run cut short is not lost."""
    ROWS.append({"part": part} | row)
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "source": "benchmarks/training_parts.py",
    }
    with open(OUT, "w") as file:
        json.dump(about | {"rows": ROWS}, file)
    print(round(time.time() - STARTED), json.dumps(ROWS[-1])[:220], flush=True)


def kernels(run) -> dict:
    """Device seconds and number of the kernels of one call, and the longest of them by name."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    by: dict[str, list[float]] = {}
    for e in found.events():
        if e.device_type == torch.autograd.DeviceType.CUDA and e.name[:3] != "Mem":
            one = by.setdefault(e.name[:90], [0.0, 0])
            one[0] += e.device_time * 1e-6
            one[1] += 1
    top = sorted(by.items(), key=lambda i: -i[1][0])[:12]
    return {
        "device_s": sum(v[0] for v in by.values()),
        "kernels": sum(v[1] for v in by.values()),
        "top": [[k, *v] for k, v in top],
    }


# ---------------------------------------------------------------- steps

VISION = [
    ("resnet50", 64), ("resnet50", 256), ("resnet18", 128), ("resnext50_32x4d", 64), ("vgg19", 64), ("inception_v3", 64), ("densenet121", 32),
    ("mobilenet_v2", 128), ("alexnet", 256), ("vit_l_16", 32), ("swin_t", 64),
]  # fmt: skip
ENCODERS = [
    ("bert-base", 32, 128),
    ("bert-base", 32, 512),
    ("bert-large", 16, 384),
    ("roberta-large", 8, 512),
]
WAYS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-mixed nhwc")


def image_step(name: str, batch: int, way: str):
    import torchvision

    model = getattr(torchvision.models, name)(
        **({"aux_logits": True, "init_weights": False} if name == "inception_v3" else {})
    ).cuda()
    x = torch.randn(
        batch, 3, *((299, 299) if name == "inception_v3" else (224, 224)), device="cuda"
    )
    y = torch.randint(1000, (batch,), device="cuda")
    if "nhwc" in way:
        model, x = (
            model.to(memory_format=torch.channels_last),
            x.to(memory_format=torch.channels_last),
        )
    optimizer = (
        torch.optim.AdamW(model.parameters())
        if "vit" in name or "swin" in name
        else torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    )

    def loss():
        out = model(x)
        return F.cross_entropy(out if torch.is_tensor(out) else out[0], y)

    return loss, optimizer


def text_step(name: str, batch: int, seq: int):
    from transformers import BertConfig, BertForMaskedLM

    size = (768, 12, 12, 3072) if "base" in name else (1024, 24, 16, 4096)
    vocab = 50265 if "roberta" in name else 30522
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=size[0],
        num_hidden_layers=size[1],
        num_attention_heads=size[2],
        intermediate_size=size[3],
        max_position_embeddings=seq,
        attn_implementation="sdpa",
    )
    model = BertForMaskedLM(config).cuda().train()
    ids = torch.randint(vocab, (batch, seq), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    return lambda: model(input_ids=ids, labels=ids).loss, optimizer


def stepping(loss, optimizer, way: str):
    precision = way.split()[0]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    kind = torch.float16 if "fp16" in way else torch.bfloat16
    scaler = torch.amp.GradScaler(enabled="fp16" in way)

    def step():
        with torch.autocast("cuda", kind, enabled="mixed" in way):
            found = loss()
        scaler.scale(found).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def whole(row: dict, make, way: str, sampler: Sampler, seconds: float) -> None:
    try:
        step = stepping(*make(), way)
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated()
        found = timed(step, seconds, sampler, least=6)
        begin = time.perf_counter()
        for _ in range(3):
            step()
        issued = (time.perf_counter() - begin) / 3
        torch.cuda.synchronize()
        add("step", row | found | {"issued_s": issued, "peak_bytes": peak} | kernels(step))
    except (RuntimeError, torch.OutOfMemoryError) as error:
        add("step", row | {"error": str(error)[:160]})
    gc.collect()
    torch.cuda.empty_cache()


def vision(sampler: Sampler) -> None:
    cases = [(n, b, 0) for n, b in VISION] + ENCODERS
    for name, batch, seq in cases:
        for way in WAYS:
            if (seq and "nhwc" in way) or (name in ("vit_l_16", "swin_t") and "nhwc" in way):
                continue
            make = (
                (lambda: text_step(name, batch, seq))
                if seq
                else (lambda: image_step(name, batch, way))
            )
            whole({"model": name, "batch": batch, "seq": seq, "way": way}, make, way, sampler, 0.7)
    for name, batch, seq in (
        ("resnet50", 4, 0),
        ("mobilenet_v2", 4, 0),
        ("vit_l_16", 1, 0),
        ("bert-base", 1, 128),
    ):
        for way in ("fp32", "bf16-mixed"):
            make = (
                (lambda: text_step(name, batch, seq))
                if seq
                else (lambda: image_step(name, batch, way))
            )
            whole({"model": name, "batch": batch, "seq": seq, "way": way}, make, way, sampler, 0.6)


# ---------------------------------------------------------------- fp8

E4M3 = torch.float8_e4m3fn


def scaled(x, dim=None):
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = 448.0 / amax.float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-448, 448).to(E4M3), scale.reciprocal()


def mm8(a, b, sa, sb):
    return torch._scaled_mm(
        a, b, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def tensor_wise(x, w, g):
    (x8, sx), (w8, sw), (g8, sg) = scaled(x), scaled(w), scaled(g)
    y = mm8(x8, w8.t(), sx, sw)
    gx = mm8(g8, w8.t().contiguous().t(), sg, sw)
    gw = mm8(g8.t().contiguous(), x8.t().contiguous().t(), sg, sx)
    return y, gx, gw


def row_wise(x, w, g):
    (x8, sx), (w8, sw) = scaled(x, 1), scaled(w, 1)
    y = mm8(x8, w8.t(), sx, sw.t())
    (g8, sg), (wk, swk) = scaled(g, 1), scaled(w, 0)
    gx = mm8(g8, wk.t().contiguous().t(), sg, swk)
    (gn, sgn), (xk, sxk) = scaled(g, 0), scaled(x, 0)
    gw = mm8(gn.t().contiguous(), xk.t().contiguous().t(), sgn.t(), sxk)
    return y, gx, gw


def plain(x, w, g):
    return x @ w.t(), g @ w, g.t() @ x


def fp8(sampler: Sampler) -> None:
    for m, n, k in (
        (16384, 14336, 4096),
        (16384, 4096, 14336),
        (16384, 4096, 4096),
        (16384, 3584, 8192),
        (8192, 28672, 8192),
        (4096, 2048, 2048),
    ):
        x, w, g = (
            torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (n, k), (m, n))
        )
        for name, run in (
            ("bf16", plain),
            ("tensor-wise", torch.compile(tensor_wise)),
            ("row-wise", torch.compile(row_wise)),
        ):
            try:
                go = lambda: run(x, w, g)
                go()
                add(
                    "fp8",
                    {"m": m, "n": n, "k": k, "way": name} | timed(go, 0.8, sampler) | kernels(go),
                )
            except RuntimeError as error:
                add("fp8", {"m": m, "n": n, "k": k, "way": name, "error": str(error)[:160]})


# ---------------------------------------------------------------- experts


def grouped(sampler: Sampler) -> None:
    """Products of experts alone, over experts and rows of each."""
    for experts, n, k in (
        (8, 14336, 4096),
        (8, 2048, 7168),
        (32, 2048, 7168),
        (64, 1408, 2048),
        (128, 768, 2048),
    ):
        for rows in (16, 64, 256, 1024, 4096):
            if experts * rows > 262144 or experts * rows * n * k > 5e13:
                continue
            x = torch.randn(experts * rows, k, device="cuda", dtype=torch.bfloat16)
            w = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16)
            offs = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * rows
            shape = {"experts": experts, "rows": rows, "n": n, "k": k}
            go = lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=offs)
            add("grouped", shape | {"way": "bf16"} | timed(go, 0.15, sampler))
            g = torch.randn(experts * rows, n, device="cuda", dtype=torch.bfloat16)
            back = lambda: torch._grouped_mm(g.t(), x, offs=offs)
            add("grouped", shape | {"way": "bf16 wgrad"} | timed(back, 0.15, sampler))
            try:
                x8, sx = scaled(x, 1)
                w8, sw = scaled(w, 2)
                go8 = lambda: torch._scaled_grouped_mm(
                    x8,
                    w8.transpose(-2, -1),
                    sx.squeeze(1),
                    sw.squeeze(2),
                    offs=offs,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=True,
                )
                add("grouped", shape | {"way": "fp8 row-wise"} | timed(go8, 0.15, sampler))
            except (RuntimeError, TypeError) as error:
                add("grouped", shape | {"way": "fp8 row-wise", "error": str(error)[:160]})


class Experts(torch.nn.Module):
    """Router, sort, grouped products, and back in order, as torchtitan's layers do it."""

    def __init__(self, hidden: int, inner: int, experts: int, top: int) -> None:
        super().__init__()
        make = lambda *s: torch.nn.Parameter(
            torch.randn(*s, device="cuda", dtype=torch.bfloat16) * 0.02
        )
        self.router, self.gate, self.up = (
            make(experts, hidden),
            make(experts, inner, hidden),
            make(experts, inner, hidden),
        )
        self.down, self.top, self.experts = make(experts, hidden, inner), top, experts

    def forward(self, x):
        scores = torch.sigmoid((x @ self.router.t()).float())
        best, chosen = torch.topk(scores, self.top, dim=-1, sorted=False)
        counts = torch.histc(chosen.view(-1).float(), bins=self.experts, min=0, max=self.experts)
        order = torch.argsort(chosen.view(-1), stable=True)
        rows = order // self.top
        routed = x[rows]
        offs = torch.cumsum(counts, 0).to(torch.int32)
        mm = lambda a, w: torch._grouped_mm(a, w.transpose(-2, -1), offs=offs)
        h = F.silu(mm(routed, self.gate)) * mm(routed, self.up)
        made = mm(h, self.down) * best.view(-1)[order].unsqueeze(1).to(x.dtype)
        return torch.zeros_like(x).scatter_add(0, rows.unsqueeze(1).expand(-1, x.shape[1]), made)


def experts(sampler: Sampler) -> None:
    grouped(sampler)
    for name, hidden, inner, many, top, tokens in (
        ("mixtral", 4096, 14336, 8, 2, 4096), ("mixtral", 4096, 14336, 8, 2, 16384), ("deepseek-lite", 2048, 1408, 64, 6, 8192),
        ("qwen3-30b", 2048, 768, 128, 8, 8192), ("qwen3-30b", 2048, 768, 128, 8, 32768), ("one rank of deepseek-v3", 7168, 2048, 8, 8, 4096),
    ):  # fmt: skip
        layer = Experts(hidden, inner, many, top)
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        for way, module in (("eager", layer), ("compiled", torch.compile(layer))):

            def go():
                module(x).backward(g)
                x.grad = None
                for p in layer.parameters():
                    p.grad = None

            row = {
                "name": name,
                "hidden": hidden,
                "inner": inner,
                "experts": many,
                "top": top,
                "tokens": tokens,
                "way": way,
            }
            try:
                go()
                add("experts", row | timed(go, 0.6, sampler) | kernels(go))
            except RuntimeError as error:
                add("experts", row | {"error": str(error)[:200]})


# ---------------------------------------------------------------- attention


def attention(sampler: Sampler) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for b, h, s, d, causal in (
        (2, 32, 8192, 128, True),
        (1, 32, 32768, 128, True),
        (1, 8, 131072, 128, True),
        (1, 32, 16384, 128, False),
        (8, 32, 2048, 128, True),
        (32, 16, 512, 64, False),
        (64, 12, 197, 64, False),
    ):
        q, k, v = (
            torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        g = torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16)
        for name, backend in backends.items():
            with sdpa_kernel(backend):
                row = {"b": b, "heads": h, "seq": s, "d": d, "causal": causal, "backend": name}
                with torch.no_grad():
                    add(
                        "attention",
                        row
                        | {"way": "forward"}
                        | timed(
                            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
                            0.8,
                            sampler,
                        ),
                    )

                def both():
                    F.scaled_dot_product_attention(q, k, v, is_causal=causal).backward(g)
                    q.grad = k.grad = v.grad = None

                add("attention", row | {"way": "both"} | timed(both, 1.0, sampler, least=4))
    # the longest there is in fp32, as fp32 encoders run it
    for b, h, s, d in ((32, 12, 512, 64), (16, 16, 384, 64)):
        q, k, v = (torch.randn(b, h, s, d, device="cuda", requires_grad=True) for _ in range(3))
        g = torch.randn(b, h, s, d, device="cuda")

        def both():
            F.scaled_dot_product_attention(q, k, v).backward(g)
            q.grad = k.grad = v.grad = None

        add(
            "attention",
            {
                "b": b,
                "heads": h,
                "seq": s,
                "d": d,
                "causal": False,
                "backend": "fp32",
                "way": "both",
            }
            | timed(both, 0.6, sampler),
        )


# ---------------------------------------------------------------- contention

COPIER = """
import triton, triton.language as tl

@triton.jit
def copier(src, dst, n, loops, P: tl.constexpr, B: tl.constexpr):
    pid = tl.program_id(0)
    for i in range(loops):
        at = ((i * P + pid) % (n // B)) * B
        offs = at + tl.arange(0, B)
        tl.store(dst + offs, tl.load(src + offs))
"""


def contend(sampler: Sampler) -> None:
    folder = os.path.dirname(os.path.abspath(OUT))
    with open(os.path.join(folder, "copier.py"), "w") as file:
        file.write(COPIER)
    sys.path.insert(0, folder)
    from copier import copier

    src, dst = (torch.empty(2**28, device="cuda", dtype=torch.float32) for _ in range(2))
    side = torch.cuda.Stream()
    shapes = {
        "gemm 16384x14336x4096": (16384, 14336, 4096),
        "gemm 16384x4096x4096": (16384, 4096, 4096),
        "gemm 8192x8192x8192": (8192, 8192, 8192),
    }
    jobs = {}
    for name, (m, n, k) in shapes.items():
        a, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (n, k)))
        jobs[name] = lambda a=a, b=b: F.linear(a, b)
    q = torch.randn(2, 32, 8192, 128, device="cuda", dtype=torch.bfloat16)
    jobs["attention 2x32x8192x128"] = lambda: F.scaled_dot_product_attention(
        q, q, q, is_causal=True
    )
    z = torch.randn(2**27, device="cuda", dtype=torch.bfloat16)
    jobs["elementwise 128Mi"] = lambda: torch.nn.functional.gelu(z)
    for programs in (0, 8, 16, 24, 32):
        rate = 0.0
        if programs:  # how fast the copy is alone
            copier[(programs,)](src, dst, src.numel(), 2000, P=programs, B=8192, num_warps=16)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            copier[(programs,)](src, dst, src.numel(), 8000, P=programs, B=8192, num_warps=16)
            torch.cuda.synchronize()
            each = (time.perf_counter() - begin) / 8000
            rate = programs * 8192 * 8 / each
        for name, job in jobs.items():
            job()
            torch.cuda.synchronize()
            many = 40
            if programs:
                with torch.cuda.stream(side):
                    copier[(programs,)](
                        src, dst, src.numel(), int(0.6 / each), P=programs, B=8192, num_warps=16
                    )
                time.sleep(0.01)
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            ends[0].record()
            for _ in range(many):
                job()
            ends[1].record()
            ends[1].synchronize()
            busy = not side.query()
            took = ends[0].elapsed_time(ends[1]) / many * 1e-3
            torch.cuda.synchronize()
            add(
                "contend",
                {
                    "job": name,
                    "programs": programs,
                    "copied_bytes_per_s": rate,
                    "seconds": took,
                    "beside": busy,
                },
            )


def sharded(sampler: Sampler) -> None:
    """Copies of FSDP2: shards into one buffer, gathered parameters out of it, gradients into it."""
    layer = [
        (4096, 4096),
        (1024, 4096),
        (1024, 4096),
        (4096, 4096),
        (14336, 4096),
        (14336, 4096),
        (4096, 14336),
        (4096,),
        (4096,),
    ]
    for ranks in (8, 64):
        sizes = [torch.Size(s).numel() // ranks for s in layer]
        gathered = torch.randn(ranks, sum(sizes), device="cuda", dtype=torch.bfloat16)
        outs = [torch.empty(ranks, s, device="cuda", dtype=torch.bfloat16) for s in sizes]
        run = lambda: torch.split_with_sizes_copy(gathered, sizes, dim=1, out=outs)
        add(
            "sharded",
            {"op": "copy out", "ranks": ranks, "elements": gathered.numel()}
            | timed(run, 0.2, sampler),
        )
        grads = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in layer]
        cat = torch.empty(ranks, sum(sizes), device="cuda", dtype=torch.float32)
        run = lambda: torch._chunk_cat(grads, dim=0, num_chunks=ranks, out=cat)
        add(
            "sharded",
            {"op": "chunk cat to fp32", "ranks": ranks, "elements": cat.numel()}
            | timed(run, 0.2, sampler),
        )
        shards = [torch.randn(s, device="cuda") for s in sizes]
        ins = torch.empty(sum(sizes), device="cuda", dtype=torch.bfloat16).split(sizes)
        run = lambda: torch._foreach_copy_(list(ins), shards)
        add(
            "sharded",
            {"op": "copy in", "ranks": ranks, "elements": sum(sizes)} | timed(run, 0.2, sampler),
        )


PARTS = {
    "contend": contend,
    "sharded": sharded,
    "fp8": fp8,
    "experts": experts,
    "attention": attention,
    "vision": vision,
}

if __name__ == "__main__":
    sampler = Sampler()
    for part in sys.argv[2:] or PARTS:
        try:
            PARTS[part](sampler)
        except Exception as error:
            add(part, {"failed": f"{type(error).__name__}: {error}"[:300]})
