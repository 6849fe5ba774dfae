"""Small steps whose times with other ranks can be worked out on paper."""

from foretell.graph import Builder

BANDWIDTH = 1e9  # bytes/s of every link in these steps
START = 15e-6  # seconds before a collective moves anything
COPY = 1.5e-6  # seconds of a copy kernel beside its bytes; nobody named a device: 0.8e12 bytes/s


def copied(size):
    """Seconds to copy a gradient on a device nobody named."""
    return COPY + 2 * size / 0.8e12


def bare(size=4e8, layers=2, update=1.0):
    """One rank without a host: a second a layer and pass, a gradient of `size` bytes a layer."""
    make = Builder()
    lane = make.lane("stream", kind="compute")

    def kernel(op, phase, layer="", seconds=1.0):
        return make.task(kind="kernel", op=op, lane=lane, phase=phase, layer=layer, seconds=seconds)

    for k in range(layers):
        kernel("gemm", "forward", f"linear.{k}")
    for k in reversed(range(layers)):
        kernel("gemm_back", "backward", f"linear.{k}")
    if update:
        kernel("add_", "update", seconds=update)
    for k in range(layers):
        make.buffer(size, name=f"linear.{k}", kind="gradient")
        make.buffer(2 * size, name=f"linear.{k}", kind="optimizer")
        make.buffer(size, name=f"linear.{k}", kind="parameter")
    return make.graph(network_bandwidth=BANDWIDTH)


def hosted(shapes=("1000x2000", "500x1000"), add=False):
    """One rank with a main and an autograd thread; per layer a forward, a backward, a gradient.

    `add` lets autograd add to old gradients, as it does where they are set to zero.
    """
    make = Builder()
    main, other = make.lane("main", kind="host"), make.lane("autograd", kind="host")
    stream = make.lane("stream", kind="compute")

    def launched(thread, op, **where):
        call = make.task(kind="host", op="cudaLaunchKernel", name=op, lane=thread, seconds=1e-5,
                         phase=where["phase"])  # fmt: skip
        kernel = make.task(kind="kernel", op=op, lane=stream, dtype="fp32", **where)
        make.wait(kernel, call, kind="launch")
        return call

    over = None
    for k, shape in enumerate(shapes):
        over = launched(main, "mm", phase="forward", layer=f"linear.{k}", seconds=1e-3,
                 shape=f"in=64x10+{shape},types=float+float")  # fmt: skip
    last = None
    for k, shape in reversed(list(enumerate(shapes))):
        where = {"phase": "backward", "layer": f"linear.{k}"}
        call = launched(other, "mm_back", seconds=2e-3, shape=f"in=64x10+{shape}", **where)
        if last is None:
            make.wait(call, over, kind="thread")
        visit = {"kind": "host", "name": "AccumulateGrad", "lane": other, "seconds": 5e-6, **where}
        last = make.task(op="add_" if add else "AccumulateGrad", **visit)
        if add:
            launched(other, "add_", seconds=1e-5, shape=f"in={shape}+{shape}", **where)
            last = make.task(op="add_", **visit)
    for k, shape in enumerate(shapes):
        call = launched(main, "add_", phase="update", seconds=1e-4, shape=f"in={shape}+{shape}")
        if k == 0:
            make.wait(call, last, kind="thread")
    return make.graph(network_bandwidth=BANDWIDTH)
