"""Small steps as a trace gives them: pieces of operators, calls, kernels, and gaps between."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretell.graph import Builder, Graph

PIECE, CALL, GAP, KERNEL = 1e-5, 5e-6, 2e-5, 1e-3  # seconds
DEVICE = "NVIDIA A100-SXM4-80GB"


@dataclass
class Step:
    """A step while it is written down: one thread, one stream."""

    make: Builder = field(default_factory=Builder)
    phase: str = "forward"
    main: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        self.main = self.make.lane("thread 1", kind="host")
        self.stream = self.make.lane("stream 7", kind="compute")

    def host(self, op: str, seconds: float = PIECE, **columns) -> int:
        columns = {"kind": "host", "phase": self.phase, "name": op, **columns}
        return self.make.task(op=op, lane=self.main, seconds=seconds, **columns)

    def op(
        self, op: str, shape: str = "", layer: str = "", kernels: int = 1, **columns
    ) -> list[int]:
        """An operator that launches kernels: a piece, its calls, a last piece with a gap."""
        found = []
        for _ in range(kernels):
            self.host(op, layer=layer)
            call = self.host("cudaLaunchKernel", CALL, name=op, layer=layer)
            found.append(self.kernel(op, call, shape=shape, layer=layer, **columns))
        self.host(op, layer=layer, gap=GAP)
        return found

    def kernel(self, op: str, call: int, **columns) -> int:
        columns = {"kind": "kernel", "seconds": KERNEL, "dtype": "fp32", "name": op, **columns}
        made = self.make.task(op=op, lane=self.stream, phase=self.phase, **columns)
        self.make.wait(made, call, kind="launch")
        return made

    def copy(
        self, size: float, seconds: float, name: str = "Memcpy HtoD (Pageable -> Device)"
    ) -> int:
        """A copy from pageable memory: the call stages it, and a synchronisation ends it."""
        call = self.host("cudaMemcpyAsync", 1e-4, name="copy_", gap=2e-3, layer="to.0")
        made = self.kernel("copy_", call, kind="copy", name=name, bytes=size, seconds=seconds)
        self.host("cudaStreamSynchronize", 1e-6, name="copy_", kind="sync", layer="to.0",
                  drains=[self.stream])  # fmt: skip
        return made

    def graph(self) -> Graph:
        return self.make.graph(device=DEVICE)


def convnet() -> Graph:
    """Data loaded and copied; two convolutions with normalisation, a pool; backward; `.item()`."""
    s = Step()
    s.host("load", 0.05, name="enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
           kind="load", phase="load")  # fmt: skip
    s.copy(16 * 3 * 224 * 224 * 4.0, 4e-3)
    x, y = "16x3x224x224", "16x64x112x112"
    for k, image in enumerate((x, y)):
        filters = "64x3x7x7" if k == 0 else "64x64x3x3"
        s.op("convolution", f"in={image}+{filters},types=float+float", f"conv2d.{k}")
        s.op("native_batch_norm", f"in={y}+64,types=float+float", f"batch_norm.{k}")
        s.op("clamp_min_", f"in={y}+-,types=float+Scalar", f"relu_.{k}")
    s.op("max_pool2d_with_indices", f"in={y},types=float", "max_pool2d.0")
    s.host("cudaStreamSynchronize", 1e-6, name="item", kind="sync", drains=[s.stream])
    s.phase = "backward"
    s.op("max_pool2d_with_indices_backward", f"in={y}+{y},types=float+float", "max_pool2d.0")
    for k, image in ((1, y), (0, x)):
        filters = "64x3x7x7" if k == 0 else "64x64x3x3"
        s.op("threshold_backward", f"in={y}+{y}+-,types=float+float+Scalar", f"relu_.{k}")
        s.op("native_batch_norm_backward", f"in={y}+{y}+64,types=float+float+float", f"batch_norm.{k}")  # noqa: E501  # fmt: skip
        s.op("convolution_backward", f"in={y}+{image}+{filters},types=float+float+float", f"conv2d.{k}", 2)  # noqa: E501  # fmt: skip
    return s.graph()


HEADS, LENGTH, WIDTH = 96, 512, 64


def attention() -> Graph:
    """Three projections and an attention written out, forward and backward."""
    s = Step()
    tokens, hidden = 8 * LENGTH, 768
    for k in range(3):
        s.op("addmm", f"in={hidden}+{tokens}x{hidden}+{hidden}x{hidden},types=float+float+float", f"linear.{k}")  # noqa: E501  # fmt: skip
        s.host("view", name="view", gap=GAP)
    q, keys = f"{HEADS}x{LENGTH}x{WIDTH}", f"{HEADS}x{WIDTH}x{LENGTH}"
    scores = f"{HEADS}x{LENGTH}x{LENGTH}"
    s.op("bmm", f"in={q}+{keys},types=float+float", "bmm.0")
    s.host("view", name="view", gap=GAP)
    s.op("fill_", "in=16+-,types=float+Scalar", "mask.0")
    s.op("div", f"in={scores}+-,types=float+Scalar", "div.0")
    s.op("_softmax", f"in={scores}+-,types=float+Scalar", "softmax.0")
    s.op("native_dropout", f"in={scores}+-,types=float+Scalar", "dropout.0")
    s.op("bmm", f"in={scores}+{q},types=float+float", "bmm.1")
    s.op("addmm", "in=768+4096x768+768x3072,types=float+float+float", "linear.3")
    s.op("relu", "in=4096x3072,types=float", "relu.0")
    s.phase = "backward"
    s.op("bmm", f"in={scores}+{q},types=float+float", "bmm.1")
    s.op("bmm", f"in={q}+{keys},types=float+float", "bmm.1")
    s.op("native_dropout_backward", f"in={scores}+{scores},types=float+bool", "dropout.0")
    s.op("_softmax_backward_data", f"in={scores}+{scores},types=float+float", "softmax.0")
    s.op("div", f"in={scores}+-,types=float+Scalar", "div.0")
    s.op("bmm", f"in={keys}+{scores},types=float+float", "bmm.0")
    s.op("bmm", f"in={scores}+{q},types=float+float", "bmm.0")
    for k in (2, 1, 0):
        s.op("mm", f"in={tokens}x{hidden}+{hidden}x{hidden},types=float+float", f"linear.{k}")
        s.op("mm", f"in={hidden}x{tokens}+{tokens}x{hidden},types=float+float", f"linear.{k}")
    return s.graph()
