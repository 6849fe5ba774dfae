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
        told = {"External id": self.ids, **{keys[k]: v for k, v in args.items()}}
        self.add("Operator" if self.old else "cpu_op", name, start, end, tid=tid, args=told)

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
        told = {"device": device, "stream": stream, **args}
        if correlation is not None:
            told["correlation"] = correlation
        if self.old:
            cat = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "gpu_memset": "Memset"}[cat]
        tid: Any = f"stream {stream}" if self.old else stream
        self.add(cat, name, start, end, pid=device, tid=tid, args=told)

    def launch(
        self, name: str, start: float, end: float, correlation: int, run: tuple[float, float], *,
        tid: int = MAIN, stream: int = 7, **args: Any,
    ) -> None:  # fmt: skip
        """A launch call and the kernel it starts."""
        self.call("cudaLaunchKernel", start, end, correlation, tid=tid)
        self.work(name, *run, correlation, stream=stream, **args)

    def sync(self, name: str, start: float, end: float, correlation: int, **args: Any) -> None:
        """What a `cuda_sync` event tells of a call."""
        told = {"cuda_sync_kind": name, "correlation": correlation, "device": 0, **args}
        self.add("cuda_sync", name, start, end, pid=0, tid=args.get("stream", -1), args=told)

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
