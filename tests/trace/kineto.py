"""Writes small traces in the form that torch.profiler exports: times in microseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from foretell.trace.read import recognised, recorded_ranks

MAIN, BACKWARD = 100, 101  # threads
PROCESS = 100


class Kineto:
    """Collects events and writes them as one trace."""

    def __init__(self, *, base: float = 1000.0, old: bool = False, **facts: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.facts = facts
        self.base = base
        self.old = old
        self.ids = 0

    def add(self, cat: str, name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
        place = {"pid": more.pop("pid", PROCESS), "tid": more.pop("tid", MAIN)}
        event = {
            "ph": "X", "cat": cat, "name": name, **place,
            "ts": self.base + start, "dur": end - start, "args": more.pop("args", {}),
        }  # fmt: skip
        self.events.append(event)
        return event

    def op(self, name: str, start: float, end: float, *, tid: int = MAIN, **args: Any) -> None:
        self.ids += 1
        keys = {"external": "External id", "sequence": "Sequence number",
                "forward": "Fwd thread id", "dims": "Input Dims", "types": "Input type",
                "values": "Concrete Inputs"}  # fmt: skip
        answer = {"External id": self.ids, **{keys[k]: v for k, v in args.items()}}
        self.add("Operator" if self.old else "cpu_op", name, start, end, tid=tid, args=answer)

    def note(self, name: str, start: float, end: float, *, tid: int = MAIN, **args: Any) -> None:
        cat = "Operator" if self.old else "user_annotation"
        self.add(cat, name, start, end, tid=tid, args=args)

    def call(
        self, name: str, start: float, end: float, correlation: int, *, tid: int = MAIN
    ) -> None:
        cat = "Runtime" if self.old else "cuda_runtime"
        where = str(tid) if self.old else tid  # torch 1.8 writes threads of calls as text
        self.add(cat, name, start, end, tid=where, args={"cbid": 211, "correlation": correlation})  # type: ignore[arg-type]

    def work(
        self, name: str, start: float, end: float, correlation: int | None, *,
        stream: int = 7, device: int = 0, cat: str = "kernel", **args: Any,
    ) -> None:  # fmt: skip
        answer = {"device": device, "stream": stream, **args}
        if correlation is not None:
            answer["correlation"] = correlation
        if self.old:
            cat = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "gpu_memset": "Memset"}[cat]
        tid: Any = f"stream {stream}" if self.old else stream
        self.add(cat, name, start, end, pid=device, tid=tid, args=answer)

    def launch(
        self, name: str, start: float, end: float, correlation: int, run: tuple[float, float], *,
        tid: int = MAIN, stream: int = 7, **args: Any,
    ) -> None:  # fmt: skip
        """A launch call and the kernel it starts."""
        self.call("cudaLaunchKernel", start, end, correlation, tid=tid)
        self.work(name, *run, correlation, stream=stream, **args)

    def sync(self, name: str, start: float, end: float, correlation: int, **args: Any) -> None:
        """What a `cuda_sync` event tells of a call."""
        answer = {"cuda_sync_kind": name, "correlation": correlation, "device": 0, **args}
        self.add("cuda_sync", name, start, end, pid=0, tid=args.get("stream", -1), args=answer)

    def document(self) -> dict[str, Any]:
        return {"schemaVersion": 1, **self.facts, "traceEvents": self.events, "traceName": "t.json"}

    def text(self) -> str:
        return json.dumps(self.document())

    def write(self, path: Path) -> Path:
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def training_step(k: Kineto, at: float = 0.0, number: int = 1, scale: float = 1.0) -> float:
    """One small step: load, forward, loss, backward on its own thread, update; when it ends."""
    s, c = scale, 1000 * number

    def t(x: float) -> float:
        return at + x * s

    k.note(f"ProfilerStep#{number}", t(0), t(1000))
    k.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", t(10), t(110))
    k.op("aten::stack", t(20), t(60))
    k.op("aten::conv2d", t(150), t(250), sequence=10 * number, dims=[[8, 3, 32, 32], [16, 3, 3, 3]],
         types=["float", "float"], values=["", "", "", "[1, 1]"])  # fmt: skip
    k.op("aten::cudnn_convolution", t(160), t(240), dims=[[8, 3, 32, 32], [16, 3, 3, 3]],
         types=["float", "float"])  # fmt: skip
    k.launch("conv_kernel", t(200), t(210), c + 1, (t(212), t(300)))
    k.op("aten::cross_entropy_loss", t(280), t(330), sequence=10 * number + 1)
    k.launch("loss_kernel", t(300), t(310), c + 2, (t(312), t(320)))
    k.op("autograd::engine::evaluate_function: NllLossBackward0", t(400), t(450), tid=BACKWARD,
         sequence=10 * number + 1, forward=1)  # fmt: skip
    k.launch("loss_backward", t(420), t(430), c + 3, (t(432), t(440)), tid=BACKWARD)
    k.op("autograd::engine::evaluate_function: ConvolutionBackward0", t(460), t(560), tid=BACKWARD,
         sequence=10 * number, forward=1)  # fmt: skip
    k.op("aten::convolution_backward", t(470), t(550), tid=BACKWARD)
    k.launch("conv_backward", t(500), t(510), c + 4, (t(512), t(700)), tid=BACKWARD)
    k.note("Optimizer.step#SGD.step", t(600), t(800))
    k.op("aten::add_", t(650), t(700))
    k.launch("update_kernel", t(670), t(680), c + 5, (t(702), t(710)))
    k.op("aten::item", t(820), t(900))
    k.call("cudaMemcpyAsync", t(830), t(840), c + 6)
    k.work("Memcpy DtoH (Device -> Pageable)", t(842), t(844), c + 6, cat="gpu_memcpy", bytes=4)
    k.call("cudaStreamSynchronize", t(841), t(850), c + 7)
    return t(1000)


def steps_of(path: Path) -> tuple[list[tuple[int, float]], str]:
    """Number and measured seconds of each step that the first rank has, and how it was found."""
    first = recorded_ranks(recognised(path), path)[0]
    found = zip(first.steps.number.tolist(), first.seconds.tolist(), strict=True)
    return list(found), first.steps.found_by


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LAYERS, BUCKETS, WIDE = 12, 3, 1024
FORWARD, BACKWARD_KERNEL, REDUCE, UPDATE = 180.0, 350.0, 400.0, 60.0  # microseconds of kernels


def data_parallel(folder: Path, ranks: int = 4, slow: int = 2, by: float = 1.3) -> Path:
    """Traces of a data-parallel step, one a rank, in which one rank's kernels run slower.

    Twelve linear layers; their gradients are all-reduced in three buckets beside the backward pass.
    """
    pace = [by if k == slow else 1.0 for k in range(ranks)]
    ends = _reduced(pace)
    for k in range(ranks):
        info = {"rank": k, "world_size": ranks, "backend": "nccl"}
        trace = Kineto(distributedInfo=info, deviceProperties=[{"id": k, "name": "NVIDIA H100"}])
        _rank(trace, k, pace[k], ends, ranks)
        trace.write(folder / f"rank{k}.json.gz")
    return folder


def _made(pace: float) -> list[float]:
    """When the gradients of each bucket are there on a rank."""
    each, begin = LAYERS // BUCKETS, 100 + LAYERS * FORWARD * pace
    return [begin + (b + 1) * each * BACKWARD_KERNEL * pace for b in range(BUCKETS)]


def _reduced(pace: list[float]) -> list[float]:
    """When the all-reduce of each bucket ends: everywhere at once, after the last rank came."""
    ends, free = [], 0.0
    for bucket in zip(*map(_made, pace), strict=True):
        free = max(*bucket, free) + REDUCE
        ends.append(free)
    return ends


def _rank(k: Kineto, rank: int, pace: float, ends: list[float], ranks: int) -> None:
    device, calls = {"device": rank}, iter(range(1, 10_000))
    shape = [[WIDE], [2048, WIDE], [WIDE, WIDE]]
    k.note("ProfilerStep#1", 0, ends[-1] + UPDATE + 20)
    at = 100.0
    for n in range(LAYERS):
        host = 20.0 + 15 * n
        k.note(f"nn.Module: Linear_{n}", host, host + 13)
        k.op("aten::addmm", host + 1, host + 12, dims=shape, types=["float"] * 3, sequence=n)
        run = (at, at + FORWARD * pace - 2)
        k.launch("sm90_sgemm", host + 4, host + 8, next(calls), run, **device)
        at += FORWARD * pace
    each, made = LAYERS // BUCKETS, _made(pace)
    for n in reversed(range(LAYERS)):
        host = 220.0 + 25 * (LAYERS - n)
        k.op("autograd::engine::evaluate_function: AddmmBackward0", host, host + 20, tid=BACKWARD,
             sequence=n, forward=1)  # fmt: skip
        k.op("aten::mm", host + 1, host + 10, tid=BACKWARD, dims=[[WIDE, 2048], [2048, WIDE]],
             types=["float"] * 2)  # fmt: skip
        run = (at, at + BACKWARD_KERNEL * pace - 2)
        k.launch("sm90_sgemm_nt", host + 3, host + 7, next(calls), run, tid=BACKWARD, **device)
        at += BACKWARD_KERNEL * pace
        if n % each == 0:
            b = BUCKETS - 1 - n // each
            _all_reduce(k, host + 21, calls, (made[b] + 2, ends[b]), device, ranks)
    k.call("cudaStreamWaitEvent", 600, 602, next(calls))
    k.note("Optimizer.step#SGD.step", 605, 640)
    k.op("aten::_foreach_add_", 610, 635)
    k.launch("multi_tensor_apply_kernel", 615, 620, next(calls),
             (ends[-1] + 2, ends[-1] + UPDATE), **device)  # fmt: skip
    k.call("cudaDeviceSynchronize", 660, ends[-1] + UPDATE + 5, next(calls))


def _all_reduce(
    k: Kineto, at: float, calls: Any, run: tuple[float, float], device: Any, ranks: int
) -> None:
    """An all-reduce of one bucket: it waits for the gradients, and the update waits for it."""
    sent = WIDE * WIDE * (LAYERS // BUCKETS)
    group = {"Process Group Ranks": str(list(range(ranks))), "Collective name": "allreduce",
             "In msg nelems": sent, "Out msg nelems": sent, "dtype": "Float"}  # fmt: skip
    k.note("nccl:all_reduce", at, at + 3.8, tid=BACKWARD)
    k.op("record_param_comms", at + 0.1, at + 3.7, tid=BACKWARD)
    k.call("cudaEventRecord", at + 0.2, at + 0.5, next(calls), tid=BACKWARD)
    k.call("cudaStreamWaitEvent", at + 0.6, at + 0.9, next(calls), tid=BACKWARD)
    k.launch(NCCL, at + 1, at + 3, next(calls), run, tid=BACKWARD, stream=20, **device, **group)
    k.call("cudaEventRecord", at + 3.1, at + 3.4, next(calls), tid=BACKWARD)
