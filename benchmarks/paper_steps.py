"""Time the optimizations of papers that foretell has what-ifs for, on one GPU.

    python benchmarks/paper_steps.py OUT PRICES.json [MODEL…] [--only WAY,…]

On the device itself: batch normalisation taken apart and joined with its ReLU (Triton), inputs of
convolutions moved to the host and back, ReLU outputs kept in 8 bits or 1, matmuls of one input
joined, bias and ReLU done in epilogues. Between ranks, with DistributedDataParallel and its
hooks: deep gradient compression, PowerSGD, local SGD, BlueConnect, parameter servers and P3. There
are no other ranks: a message is a kernel that waits on the stream of communication for as long as
PRICES.json says (written by `paper_prices.py`), and servers' links are kept by a thread. So
all that a method does on the device and the host is real, and the network is as it is said to be.

Writes OUT/truth.json and a trace of each plain step. Needs torch with CUDA, Triton, torchvision,
transformers.
"""

import argparse
import bisect
import heapq
import importlib
import json
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import measure_variants
import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from measure_variants import BF16, Variant, optimizer_of, timed, traced
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from triton.language.extra.cuda import globaltimer
from variant_models import MODELS, Model, image

PAPERS: dict[str, Model] = {
    "resnet50": image("resnet50", "sgd", 64),
    "vgg16": image("vgg16", "sgd", 32),
    "vgg16_bn": image("vgg16_bn", "sgd", 32),
} | {name: MODELS[name] for name in ("resnet18", "densenet121", "distilbert", "llama_110m", "t5_small")}  # noqa: E501  # fmt: skip
EVERY = 8  # steps between two averages of local SGD
Made = tuple[nn.Module, torch.optim.Optimizer]


# ---------------------------------------------------------------- batch normalisation


@triton.jit
def _gather(x, total, batch, channels, area, parts, BLOCK: tl.constexpr):
    """Sum and sum of squares of each channel, added to `total`."""
    c, part = tl.program_id(0), tl.program_id(1)
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    for n in range(part, batch, parts):
        row = x + (n * channels + c).to(tl.int64) * area
        for at in range(0, area, BLOCK):
            where = at + tl.arange(0, BLOCK)
            v = tl.load(row + where, mask=where < area, other=0.0).to(tl.float32)
            first += v
            second += v * v
    tl.atomic_add(total + c, tl.sum(first, 0))
    tl.atomic_add(total + channels + c, tl.sum(second, 0))


@triton.jit
def _finish(total, weight, bias, mean, scale, shift, invstd, running_mean, running_var, count, eps,
            momentum, channels, BLOCK: tl.constexpr):  # fmt: skip
    """Mean, scale and shift of each channel from its sums, and what is kept for evaluation."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_mine = c < channels
    m = tl.load(total + c, mask=is_mine, other=0.0) / count
    var = tl.load(total + channels + c, mask=is_mine, other=1.0) / count - m * m
    inv = 1.0 / tl.sqrt(var + eps)
    a = tl.load(weight + c, mask=is_mine, other=0.0) * inv
    b = tl.load(bias + c, mask=is_mine, other=0.0) - m * a
    tl.store(mean + c, m, mask=is_mine)
    tl.store(invstd + c, inv, mask=is_mine)
    tl.store(scale + c, a, mask=is_mine)
    tl.store(shift + c, b, mask=is_mine)
    old = tl.load(running_mean + c, mask=is_mine, other=0.0)
    tl.store(running_mean + c, old + momentum * (m - old), mask=is_mine)
    old = tl.load(running_var + c, mask=is_mine, other=0.0)
    tl.store(running_var + c, old + momentum * (var * count / (count - 1) - old), mask=is_mine)


@triton.jit
def _normed(x, beside, y, scale, shift, rows, channels, area, ADDED: tl.constexpr,
            R: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """ReLU of the normalised input, with what stands beside it added."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    where = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (r[:, None] < rows) & (where[None, :] < area)
    place = r[:, None].to(tl.int64) * area + where[None, :]
    a = tl.load(scale + r % channels)[:, None]
    b = tl.load(shift + r % channels)[:, None]
    v = tl.load(x + place, mask=mask, other=0.0) * a + b
    if ADDED:
        v += tl.load(beside + place, mask=mask, other=0.0)
    tl.store(y + place, tl.maximum(v, 0.0), mask=mask)


@triton.jit
def _gather_back(x, y, dy, scale, shift, mean, total, batch, channels, area, parts,
                 ADDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sums of each channel's gradient, and of it times the centred input."""
    c, part = tl.program_id(0), tl.program_id(1)
    a, b, m = tl.load(scale + c), tl.load(shift + c), tl.load(mean + c)
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    for n in range(part, batch, parts):
        row = (n * channels + c).to(tl.int64) * area
        for at in range(0, area, BLOCK):
            where = at + tl.arange(0, BLOCK)
            mask = where < area
            v = tl.load(x + row + where, mask=mask, other=0.0)
            g = tl.load(dy + row + where, mask=mask, other=0.0)
            if ADDED:
                is_open = tl.load(y + row + where, mask=mask, other=0.0) > 0
            else:
                is_open = v * a + b > 0
            g = tl.where(is_open, g, 0.0)
            first += g
            second += g * (v - m)
    tl.atomic_add(total + c, tl.sum(first, 0))
    tl.atomic_add(total + channels + c, tl.sum(second, 0))


@triton.jit
def _back(x, y, dy, dx, beside, scale, shift, mean, invstd, total, rows, channels, area, count,
          ADDED: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The gradient of the input, and of what was added."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    where = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (r[:, None] < rows) & (where[None, :] < area)
    place = r[:, None].to(tl.int64) * area + where[None, :]
    c = r % channels
    a, b = tl.load(scale + c)[:, None], tl.load(shift + c)[:, None]
    m, inv = tl.load(mean + c)[:, None], tl.load(invstd + c)[:, None]
    first = tl.load(total + c)[:, None] / count
    second = tl.load(total + channels + c)[:, None] / count
    v = tl.load(x + place, mask=mask, other=0.0)
    g = tl.load(dy + place, mask=mask, other=0.0)
    if ADDED:
        is_open = tl.load(y + place, mask=mask, other=0.0) > 0
    else:
        is_open = v * a + b > 0
    g = tl.where(is_open, g, 0.0)
    if ADDED:
        tl.store(beside + place, g, mask=mask)
    tl.store(dx + place, a * (g - first - (v - m) * inv * inv * second), mask=mask)


class NormRelu(torch.autograd.Function):
    """Batch normalisation, an addition if there is one, and a ReLU, in as few passes as can be."""

    @staticmethod
    def forward(ctx, x, beside, weight, bias, norm):
        n, c, area = x.shape[0], x.shape[1], x[0, 0].numel()
        block, count = min(1024, triton.next_power_of_2(area)), float(n * area)
        total = torch.zeros(2, c, device=x.device)
        mean, scale, shift, invstd = torch.empty(4, c, device=x.device)
        parts = min(n, max(1, 2048 // c))
        _gather[c, parts](x, total, n, c, area, parts, BLOCK=block)
        _finish[(triton.cdiv(c, 256),)](
            total, weight, bias, mean, scale, shift, invstd, norm.running_mean, norm.running_var,
            count, norm.eps, norm.momentum, c, BLOCK=256,
        )  # fmt: skip
        y, each = torch.empty_like(x), max(1, 2048 // block)
        grid = (triton.cdiv(n * c, each), triton.cdiv(area, block))
        added = beside is not None
        _normed[grid](
            x, beside if added else x, y, scale, shift, n * c, c, area, ADDED=added, R=each,
            BLOCK=block,
        )  # fmt: skip
        ctx.save_for_backward(x, y if added else None, mean, scale, shift, invstd)
        ctx.sizes = (n, c, area, block, count, each, grid, parts)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y, mean, scale, shift, invstd = ctx.saved_tensors
        n, c, area, block, count, each, grid, parts = ctx.sizes
        added, dy = y is not None, dy.contiguous()
        total = torch.zeros(2, c, device=x.device)
        _gather_back[c, parts](
            x, y if added else x, dy, scale, shift, mean, total, n, c, area, parts, ADDED=added,
            BLOCK=block,
        )  # fmt: skip
        dx = torch.empty_like(x)
        beside = torch.empty_like(x) if added else None
        _back[grid](
            x, y if added else x, dy, dx, beside if added else dx, scale, shift, mean, invstd,
            total, n * c, c, area, count, ADDED=added, R=each, BLOCK=block,
        )  # fmt: skip
        return dx, beside, total[1] * invstd, total[0], None


class Joined(nn.Module):
    """A batch normalisation with the ReLU behind it."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        return NormRelu.apply(x.contiguous(), beside, self.norm.weight, self.norm.bias, self.norm)


def reconstructed(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every batch normalisation that a ReLU follows, joined with it."""
    _check_norm()
    for block in list(model.modules()):
        if hasattr(block, "bn2") and hasattr(block, "downsample"):
            last = 3 if hasattr(block, "bn3") else 2
            for k in range(1, last + 1):
                setattr(block, f"bn{k}", Joined(getattr(block, f"bn{k}")))
            block.forward = _residual(block, last)
        elif hasattr(block, "bn1") and hasattr(block, "layer1"):
            block.bn1, block.relu = Joined(block.bn1), nn.Identity()
        names = [n for n, _ in block.named_children()]
        for a, b in pairwise(names):
            one, two = getattr(block, a), getattr(block, b)
            if isinstance(one, nn.BatchNorm2d) and isinstance(two, nn.ReLU):
                setattr(block, a, Joined(one))
                setattr(block, b, nn.Identity())
        if hasattr(block, "norm1") and hasattr(block, "relu1"):  # a layer of DenseNet
            for k in (1, 2):
                if isinstance(getattr(block, f"norm{k}"), nn.BatchNorm2d):
                    setattr(block, f"norm{k}", Joined(getattr(block, f"norm{k}")))
                    setattr(block, f"relu{k}", nn.Identity())
    return {}


def _residual(block: nn.Module, last: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        h = x
        for k in range(1, last):
            h = getattr(block, f"bn{k}")(getattr(block, f"conv{k}")(h))
        beside = x if block.downsample is None else block.downsample(x)
        return getattr(block, f"bn{last}")(getattr(block, f"conv{last}")(h), beside)

    return forward


def _check_norm() -> None:
    """That the kernels above say what PyTorch says."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(24).cuda()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.uniform_(-1, 1)
    for area, added in ((7, False), (40, True)):
        x, s = (torch.randn(5, 24, area, area, device="cuda", requires_grad=True) for _ in range(2))
        wanted = F.relu(norm(x) + s if added else norm(x))
        found = NormRelu.apply(x, s if added else None, norm.weight, norm.bias, norm)
        over = [x, norm.weight, norm.bias, *([s] if added else [])]
        g = torch.randn_like(wanted)
        for a, b in zip(
            [wanted, *torch.autograd.grad(wanted, over, g)],
            [found, *torch.autograd.grad(found, over, g)],
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- what is kept for the backward


class Kept:
    """One tensor that several operators keep for their backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.like = (tensor.shape, tensor.dtype, tensor.is_contiguous())
        self.uses, self.code, self.number = 0, None, -1


class Keeping:
    """Hooks on what autograd keeps; `kind` is the module that is at work."""

    def __init__(self, model: nn.Module) -> None:
        self.kind, self.known = "", weakref.WeakValueDictionary()
        self.parameters = {p.data_ptr() for p in model.parameters()}
        self.hooks: Any = None
        for module in model.modules():
            for kind in (nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Linear):
                if isinstance(module, kind):
                    module.forward = self._during(kind.__name__, module.forward)

    def _during(self, kind: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            self.kind = kind
            self.starts()
            found = forward(*given)
            self.kind = ""
            return found

        return run

    def begin(self) -> None:
        self.known.clear()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()

    def end(self) -> None:
        self.hooks.__exit__(None, None, None)

    def starts(self) -> None:
        """A module begins."""

    def pack(self, tensor: torch.Tensor) -> Any:
        is_small = tensor.numel() < 1024 or not tensor.is_floating_point()
        if tensor.data_ptr() in self.parameters or not tensor.is_cuda or is_small:
            return tensor
        kept = self.known.get(tensor.data_ptr())
        if kept is None or kept.storage.expired() or kept.like[0] != tensor.shape:
            kept = self.known[tensor.data_ptr()] = Kept(tensor)
        kept.uses += 1
        self.seen(kept, tensor)
        return kept

    def seen(self, kept: Kept, tensor: torch.Tensor) -> None:
        """A tensor is kept by the module at work."""

    def unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        kept.uses -= 1
        found = self.back(kept)
        kept.tensor = found if kept.uses else None
        return found

    def back(self, kept: Kept) -> torch.Tensor:
        assert kept.tensor is not None
        return kept.tensor


class Offload(Keeping):
    """vDNN: inputs of convolutions leave for pinned memory and come back one ahead of their use."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.out, self.into = torch.cuda.Stream(), torch.cuda.Stream()
        self.pinned: list[torch.Tensor] = []
        self.sent: list[tuple[Any, torch.cuda.Event]] = []

    def begin(self) -> None:
        self.sent.clear()
        super().begin()

    def starts(self) -> None:
        if self.kind == "Conv2d" and self.sent:
            torch.cuda.current_stream().wait_event(self.sent[-1][1])

    def seen(self, kept: Kept, tensor: torch.Tensor) -> None:
        if self.kind != "Conv2d" or kept.number >= 0:
            return
        kept.number = len(self.sent)
        if kept.number == len(self.pinned):
            self.pinned.append(torch.empty_like(tensor, device="cpu", pin_memory=True))
        self.out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.out):
            self.pinned[kept.number].copy_(tensor, non_blocking=True)
            tensor.record_stream(self.out)
            gone = torch.cuda.Event()
            gone.record()
        self.sent.append((weakref.ref(kept), gone))
        kept.tensor = None

    def back(self, kept: Kept) -> torch.Tensor:
        if kept.number < 0:
            return super().back(kept)
        self._fetch(kept.number)
        if kept.number:
            self._fetch(kept.number - 1, ahead=True)
        found, there = kept.code
        torch.cuda.current_stream().wait_event(there)
        found.record_stream(torch.cuda.current_stream())
        if not kept.uses:
            kept.code = None
        return found

    def _fetch(self, number: int, ahead: bool = False) -> None:
        ref, gone = self.sent[number]
        kept = ref()
        if kept is None or kept.code is not None or (ahead and not kept.uses):
            return
        self.into.wait_event(gone)
        # Starts with the backward of the convolution behind it, not before.
        self.into.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.into):
            found = torch.empty_like(self.pinned[number], device="cuda")
            found.copy_(self.pinned[number], non_blocking=True)
            there = torch.cuda.Event()
            there.record()
        kept.code = (found, there)

    def unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor) or kept.number < 0:
            return super().unpack(kept)
        kept.uses -= 1
        return self.back(kept)


@triton.jit
def _signs(x, bits, bytes, BLOCK: tl.constexpr):
    """Eight signs a byte."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for k in tl.static_range(8):
        v = tl.load(x + at.to(tl.int64) * 8 + k, mask=at < bytes, other=0.0)
        total += tl.where(v > 0, 1 << k, 0)
    tl.store(bits + at, total.to(tl.uint8), mask=at < bytes)


@triton.jit
def _unsigned(bits, x, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(bits + at // 8, mask=at < count, other=0).to(tl.int32)
    tl.store(x + at, ((byte >> (at % 8).to(tl.int32)) & 1).to(tl.float32), mask=at < count)


class Encode(Keeping):
    """Gist: outputs of ReLUs kept as signs before a pooling, else in 8 bits."""

    def seen(self, kept: Kept, tensor: torch.Tensor) -> None:
        if self.kind == "ReLU":
            kept.number = 0
        elif kept.number == 0 and kept.code is None and self.kind:
            kept.code = self._signs(tensor) if self.kind == "MaxPool2d" else tensor.to(torch.float8_e4m3fn)  # noqa: E501  # fmt: skip
            kept.tensor = None

    def _signs(self, tensor: torch.Tensor) -> torch.Tensor:
        count = tensor.numel() // 8
        bits = torch.empty(count, dtype=torch.uint8, device="cuda")
        _signs[(triton.cdiv(count, 1024),)](tensor, bits, count, BLOCK=1024)
        return bits

    def back(self, kept: Kept) -> torch.Tensor:
        if kept.tensor is None:
            shape, dtype, _ = kept.like
            if kept.code.dtype == torch.uint8:
                kept.tensor = torch.empty(shape, dtype=dtype, device="cuda")
                count = kept.tensor.numel()
                _unsigned[(triton.cdiv(count, 1024),)](kept.code, kept.tensor, count, BLOCK=1024)
            else:
                kept.tensor = kept.code.to(dtype)
            kept.code = None
        return kept.tensor


def offloaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    keeping = Offload(model)
    return {"begin": keeping.begin, "forward_done": keeping.end}


def encoded(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    keeping = Encode(model)
    return {"begin": keeping.begin, "forward_done": keeping.end}


# ---------------------------------------------------------------- graph substitutions

SAME_INPUT = (("q_lin", "k_lin", "v_lin"), ("query", "key", "value"), ("k_proj", "v_proj"))


class Together:
    """Linear layers of one input as one: the first asked computes all."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        first = parts[0]
        self.joined = nn.Linear(first.in_features, len(parts) * first.out_features, first.bias is not None).cuda()  # noqa: E501  # fmt: skip
        self.count, self.found = len(parts), ()

    def part(self, k: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            if k == 0:
                self.found = self.joined(x).chunk(self.count, -1)
            return self.found[k]

        return run


class Part(nn.Module):
    """One of several linear layers of one input."""

    def __init__(self, whole: Together, k: int) -> None:
        super().__init__()
        self.joined = whole.joined if k == 0 else None
        self.run = whole.part(k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def joined(model: nn.Module) -> int:
    """Linear layers of one input made one; how many are gone."""
    gone = 0
    for name, block in list(model.named_modules()):
        groups = list(SAME_INPUT)
        if hasattr(block, "relative_attention_num_buckets"):  # T5: queries are of another input
            groups.append(("k", "v") if "EncDec" in name else ("q", "k", "v"))
        for names in groups:
            if all(isinstance(getattr(block, n, None), nn.Linear) for n in names):
                whole = Together([getattr(block, n) for n in names])
                gone += len(names) - 1
                for k, n in enumerate(names):
                    setattr(block, n, Part(whole, k))
    return gone


class ConvRelu(torch.autograd.Function):
    """A convolution with bias and ReLU in its epilogue."""

    @staticmethod
    def forward(ctx, x, weight, bias, stride, padding, dilation, groups):
        y = torch.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, groups)
        ctx.save_for_backward(x, weight, y)
        ctx.how = (stride, padding, dilation, groups, bias.shape)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, y = ctx.saved_tensors
        stride, padding, dilation, groups, shape = ctx.how
        g = torch.ops.aten.threshold_backward(dy, y, 0)
        dx, dw, db = torch.ops.aten.convolution_backward(
            g, x, weight, list(shape), stride, padding, dilation, False, [0, 0], groups,
            [ctx.needs_input_grad[0], True, True],
        )  # fmt: skip
        return dx, dw, db, None, None, None, None


class LinearRelu(torch.autograd.Function):
    """A linear layer with bias and ReLU in its epilogue."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        y = torch._addmm_activation(bias, x, weight.t())
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, y = ctx.saved_tensors
        g = torch.ops.aten.threshold_backward(dy, y, 0)
        return g @ weight, g.t() @ x, g.sum(0)


def substituted(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Linear layers joined, and ReLUs of a sequence in the epilogues before them."""
    gone = joined(model)
    for block in list(model.modules()):
        if not isinstance(block, nn.Sequential):
            continue
        for k in range(len(block) - 1):
            one = block[k]
            if not isinstance(block[k + 1], nn.ReLU) or not isinstance(one, nn.Conv2d | nn.Linear):
                continue
            one.forward = _epilogue(one)
            block[k + 1], gone = nn.Identity(), gone + 1
    if not gone:
        raise ValueError("nothing to substitute")
    return {"anew": True}


def _epilogue(one: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    if isinstance(one, nn.Linear):
        return lambda x: LinearRelu.apply(x, one.weight, one.bias)
    how = (one.stride, one.padding, one.dilation, one.groups)
    return lambda x: ConvRelu.apply(x, one.weight, one.bias, *how)


# ---------------------------------------------------------------- an emulated network


@triton.jit(do_not_specialize=["nanoseconds"])
def _hold(nanoseconds):
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()


class Network:
    """Messages that take what a table says, on streams of their own."""

    def __init__(self, prices: dict[str, Any]) -> None:
        self.prices, self.ranks = prices, int(prices["ranks"])
        self.streams: dict[str, torch.cuda.Stream] = {}

    def seconds(self, op: str, bytes: float) -> float:
        sizes, times = self.prices["bytes"], self.prices[op]
        k = min(max(bisect.bisect(sizes, bytes), 1), len(sizes) - 1)
        a, b = sizes[k - 1], sizes[k]
        share = min(max((bytes - a) / (b - a), 0.0), 1.0 if k < len(sizes) - 1 else 9.9)
        return times[k - 1] + share * (times[k] - times[k - 1])

    def _stream(self, lane: str) -> torch.cuda.Stream:
        if lane not in self.streams:  # not from the streams that callbacks are run on
            self.streams[lane] = torch.cuda.Stream(priority=-1)
        return self.streams[lane]

    def send(self, op: str, bytes: float, lane: str = "all", behind: Any = None) -> Any:
        """A message behind the current stream, or another's event; the event of its end."""
        stream = self._stream(lane)
        stream.wait_event(behind or torch.cuda.current_stream().record_event())
        with torch.cuda.stream(stream):
            _hold[(8,)](int(1e9 * self.seconds(op, bytes)), num_warps=16)
            return stream.record_event()

    def future(self, tensor: torch.Tensor, event: torch.cuda.Event) -> torch.futures.Future:
        """A future that is done when an event is."""
        side = self._stream("done")
        side.wait_event(event)
        found = torch.futures.Future(devices=[tensor.device])
        with torch.cuda.stream(side):
            found.set_result([tensor])
        return found

    def all_reduce(self, tensor, op=None, group=None, async_op=False):
        """In the place of `torch.distributed.all_reduce`."""
        event = self.send("all_reduce", tensor.numel() * tensor.element_size())
        if not async_op:
            torch.cuda.current_stream().wait_event(event)
            return None
        return Work(self.future(tensor, event))


class Work:
    """What an asynchronous collective returns."""

    def __init__(self, future: torch.futures.Future) -> None:
        self.future = future

    def get_future(self) -> torch.futures.Future:
        return self.future

    def wait(self) -> None:
        self.future.wait()


class Compressed:
    """Deep gradient compression of a bucket: momentum correction, a sampled threshold."""

    def __init__(self, network: Network, ratio: float = 0.001, momentum: float = 0.9) -> None:
        self.network, self.ratio, self.momentum = network, ratio, momentum
        self.state: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def sent(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        g = bucket.buffer()
        key = bucket.index()
        if key not in self.state or self.state[key][0].numel() != g.numel():
            self.state[key] = (torch.zeros_like(g), torch.zeros_like(g))
        u, v = self.state[key]
        u.mul_(self.momentum).add_(g)
        v.add_(u)
        size = v.abs()
        few = size[:: max(1, g.numel() // max(1000, g.numel() // 100))]
        least = few.topk(max(1, int(self.ratio * few.numel()))).values[-1]
        where = (size >= least).nonzero().squeeze(1)  # the host waits here, as in the authors' code
        values = v[where]
        u[where] = 0.0
        v[where] = 0.0
        event = self.network.send("all_gather", self.network.ranks * 8.0 * where.numel())
        future = self.network.future(g, event)

        def spread(done: torch.futures.Future) -> torch.Tensor:
            g.zero_()
            n = self.network.ranks
            g.index_add_(0, where.repeat(n), values.repeat(n) / n)
            return g

        return future.then(spread)


def by_hook(name: str, network: Network) -> Callable[..., Any]:
    """A communication hook of DistributedDataParallel."""
    if name == "dgc":
        return Compressed(network).sent

    def plain(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        tensor = bucket.buffer()
        bytes = tensor.numel() * tensor.element_size()
        if name == "blueconnect":
            one = network.send("reduce_scatter inside", bytes, "inside")
            two = network.send("all_reduce between", bytes / 4, "between", one)
            event = network.send("all_gather inside", bytes, "inside back", two)
        else:
            event = network.send("all_reduce", bytes)
        return network.future(tensor, event).then(lambda f: f.value()[0])

    return plain


def replicated(name: str) -> Callable[..., dict[str, Any]]:
    """DistributedDataParallel with one of its hooks over an emulated network."""

    def change(model: nn.Module, optimizer: torch.optim.Optimizer, network: Network) -> dict:
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1)
        if name == "local-sgd":
            from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

            dist.all_reduce = network.all_reduce
            averager = PeriodicModelAverager(period=EVERY, warmup_steps=0)
            return {"after": lambda: averager.average_parameters(model.parameters())}
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        if name == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

            dist.all_reduce = network.all_reduce
            state = power.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=2
            )
            wrapped.register_comm_hook(state, power.powerSGD_hook)
        else:
            wrapped.register_comm_hook(None, by_hook(name, network))
        return {"call": wrapped}

    return change


class Servers:
    """Parameter servers: links kept by a thread, pieces in order or by priority."""

    BIG = 1_000_000

    def __init__(self, model: nn.Module, network: Network, slice_numbers: int) -> None:
        self.start, self.pace = network.prices["link"]
        self.pace *= network.ranks
        self.servers, self.slices = network.ranks, slice_numbers
        self.parameters = list(model.parameters())
        self.place = {p: k for k, p in enumerate(self.parameters)}
        self.grads = [torch.empty_like(p, device="cpu", pin_memory=True) for p in self.parameters]
        self.pieces = self._cut()
        self.there = [threading.Event() for _ in self.parameters]
        self.events: list[Any] = [None] * len(self.parameters)
        self.waiting: list[tuple[int, torch.cuda.Event]] = []
        self.copies, self.back = torch.cuda.Stream(), torch.cuda.Stream()
        self.queues = [[[] for _ in range(self.servers)] for _ in range(2)]
        self.free = [[0.0] * self.servers for _ in range(2)]
        self.flying: list[list[Any]] = [[None] * self.servers for _ in range(2)]
        self.left = [0] * len(self.parameters)
        self.is_first = True
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self._ready)
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if own:
                module.register_forward_pre_hook(self._wait(own))
        threading.Thread(target=self._serve, daemon=True).start()

    def _cut(self) -> list[list[tuple[int, float]]]:
        """(server, bytes) of every parameter's pieces."""
        found, turn = [], 0
        for p in self.parameters:
            n = p.numel()
            if self.slices:
                parts = max(1, -(-n // self.slices))
                found.append([((turn + k) % self.servers, 4.0 * n / parts) for k in range(parts)])
                turn += parts
            elif n > self.BIG:
                found.append([(s, 4.0 * n / self.servers) for s in range(self.servers)])
            else:
                found.append([(turn % self.servers, 4.0 * n)])
                turn += 1
        return found

    def _ready(self, p: torch.Tensor) -> None:
        k = self.place[p]
        self.there[k].clear()
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            self.grads[k].copy_(p.grad, non_blocking=True)
            p.grad.record_stream(self.copies)
            self.waiting.append((k, self.copies.record_event()))
        self.is_first = False

    def _wait(self, own: list[torch.Tensor]) -> Callable[..., None]:
        places = [self.place[p] for p in own]

        def run(*_: Any) -> None:
            if self.is_first:
                return
            for k in places:
                self.there[k].wait()
                if self.events[k] is not None:
                    torch.cuda.current_stream().wait_event(self.events[k])

        return run

    def _serve(self) -> None:
        """The links, for ever: what is ready waits in queues, what is done moves on."""
        torch.cuda.set_device(0)
        while True:
            now = time.perf_counter()
            while self.waiting and self.waiting[0][1].query():
                k, _ = self.waiting.pop(0)
                self.left[k] = len(self.pieces[k])
                for place, (server, bytes) in enumerate(self.pieces[k]):
                    rank = k if self.slices else 0
                    entry = (rank, now + self.start, k, place, bytes)
                    heapq.heappush(self.queues[0][server], entry)
            for way in (0, 1):
                for server in range(self.servers):
                    self._move(way, server, now)
            time.sleep(2e-5)

    def _move(self, way: int, server: int, now: float) -> None:
        while True:
            flying = self.flying[way][server]
            if flying is not None:
                if self.free[way][server] > now:
                    return
                self._landed(way, server, flying)
                self.flying[way][server] = None
            queue = self.queues[way][server]
            if not queue or queue[0][1] > now:
                return
            entry = heapq.heappop(queue)
            begin = max(self.free[way][server], entry[1])
            self.free[way][server] = begin + entry[4] * self.pace
            self.flying[way][server] = entry

    def _landed(self, way: int, server: int, entry: Any) -> None:
        rank, _, k, place, bytes = entry
        if way == 0:
            behind = self.free[0][server] + self.start
            heapq.heappush(self.queues[1][server], (rank, behind, k, place, bytes))
            return
        self.left[k] -= 1
        if not self.left[k]:
            with torch.cuda.stream(self.back), torch.no_grad():
                p = self.parameters[k]
                p.add_(self.grads[k].to("cuda", non_blocking=True), alpha=-1e-6)
                self.events[k] = self.back.record_event()
            self.there[k].set()


def served(slices: int) -> Callable[..., dict[str, Any]]:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, network: Network) -> dict:
        sys.setswitchinterval(1e-4)
        servers = Servers(model, network, slices)
        return {"no_update": True, "keep": servers}

    return change


# ---------------------------------------------------------------- steps

ALONE: dict[str, Callable[..., dict[str, Any]]] = {
    "base": lambda model, optimizer: {},
    "reconstructed-batchnorm": reconstructed,
    "vdnn": offloaded,
    "gist": encoded,
    "metaflow": substituted,
}
RANKS: dict[str, Callable[..., dict[str, Any]]] = {
    name: replicated(name)
    for name in ("data-parallel", "dgc", "powersgd", "blueconnect", "local-sgd")
} | {"parameter-server": served(0), "p3": served(50_000)}  # fmt: skip
IMAGES = ("resnet50", "resnet18", "densenet121", "vgg16")
NORMED = ("resnet50", "resnet18", "densenet121", "vgg16_bn")
SUBSTITUTED = ("vgg16", "distilbert", "llama_110m", "t5_small")
SPREAD = ("resnet50", "vgg16", "distilbert", "llama_110m")


def step_of(name: str, way: str, network: Network | None) -> Callable[[], None]:
    """One training step as a function without arguments."""
    made = PAPERS[name]
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = made.factory().cuda().train()
    x, y = (t.cuda() for t in made.batch(made.samples))
    optimizer = optimizer_of(model, made.optimizer, Variant("base"))
    done = RANKS[way](model, optimizer, network) if network else ALONE[way](model, optimizer)
    if done.get("anew"):
        optimizer = optimizer_of(model, made.optimizer, Variant("base"))
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    begin, behind, after = (done.get(k, nothing) for k in ("begin", "forward_done", "after"))
    call, update = done.get("call", model), not done.get("no_update")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        begin()
        with torch.autocast("cuda", dtype=BF16, enabled=False):
            loss = call(x, y)
        behind()
        loss.backward()
        if update:
            optimizer.step()
        after()

    step.keeps = done  # type: ignore[attr-defined]
    return step


def run(name: str, way: str, net: str, prices: dict[str, Any], row: Path, trace: Path | None) -> None:  # noqa: E501  # fmt: skip
    """Measure or trace one way of one model; the whole life of one process."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"model": name, "variant": spec(name, way, prices.get(net, {}))}
    found |= {"on": net} if net else {}
    found |= {"optimizer": PAPERS[name].optimizer, "batch": PAPERS[name].samples}
    try:
        step = step_of(name, way, Network(prices[net]) if net else None)
        if trace is not None:
            traced(step, trace)
        else:
            if way == "local-sgd":  # a period of steps is one
                single, measure_variants.STEPS, measure_variants.WARM = step, 6, 1

                def step() -> None:
                    for _ in range(EVERY):
                        single()

            found |= timed(step)
            if way == "local-sgd":
                for key in [k for k in found if k.endswith("_ms")]:
                    found[key] /= EVERY
        found["gpu"] = torch.cuda.get_device_name()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:300]
    row.write_text(json.dumps(found))
    os._exit(0)  # threads that serve


def spec(name: str, way: str, prices: dict[str, Any]) -> str:
    """The what-ifs that say what was done."""
    if not prices:
        return f"{way}:epilogue=no" if way == "metaflow" and name not in IMAGES else way
    ranks = f"ranks={prices['ranks']},skew=0"  # the ranks that are not there are all alike
    if way in ("parameter-server", "p3"):
        return f"{way}:{ranks}"
    first = f"data-parallel:{ranks}"
    return first if way == "data-parallel" else f"{first} {way}"


def jobs(names: list[str], only: set[str]) -> list[tuple[str, str, str, bool]]:
    """(model, way, network, whether it is traced) in the order they are run."""
    found = [(n, "base", "", True) for n in names] + [(n, "base", "", False) for n in names]
    for way, mine in (
        ("reconstructed-batchnorm", NORMED), ("vdnn", IMAGES), ("gist", IMAGES),
        ("metaflow", SUBSTITUTED),
    ):  # fmt: skip
        found += [(n, way, "", False) for n in mine]
    for net in ("thin", "thick"):
        ways = [w for w in RANKS if w != ("blueconnect" if net == "thin" else "local-sgd")]
        found += [(n, way, net, False) for way in ways for n in SPREAD]
    return [j for j in found if j[0] in names and (not only or j[1] in only)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("prices", type=Path)
    parser.add_argument("models", nargs="*", default=list(PAPERS))
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=540.0)
    given = parser.parse_args()
    prices = json.loads(given.prices.read_text())
    rows = given.out / "rows"
    rows.mkdir(parents=True, exist_ok=True)
    for module in ("torchvision", "transformers"):
        importlib.import_module(module)
    context, begin = multiprocessing.get_context("fork"), time.time()
    only = set(filter(None, given.only.split(",")))
    for name, way, net, is_trace in jobs(given.models, only):
        if time.time() - begin > given.seconds:
            break
        label = f"{name}.{way}{'.' + net if net else ''}"
        trace = given.out / f"{name}.base.json.gz" if is_trace else None
        row = rows / (f"trace.{label}.json" if is_trace else f"{label}.json")
        child = context.Process(target=run, args=(name, way, net, prices, row, trace))
        child.start()
        child.join(60)
        if child.is_alive():
            child.kill()
            row.write_text(json.dumps({"model": name, "variant": way, "error": "over a minute"}))
        answer = json.loads(row.read_text()) if row.exists() else {"error": "died"}
        print(f"{time.time() - begin:5.0f} {label} {answer.get('median_ms', answer.get('error'))}", flush=True)  # noqa: E501  # fmt: skip
    found = [json.loads(path.read_text()) for path in sorted(rows.glob("*.json"))]
    found = [r for r in found if "median_ms" in r or "error" in r]
    machine = {"gpu": next(r["gpu"] for r in found if "gpu" in r), "torch": torch.__version__}
    (given.out / "truth.json").write_text(json.dumps(machine | {"rows": found}, indent=1))


if __name__ == "__main__":
    main()
