"""What the host spends to issue operators: Python, dispatch, autograd and the launch.

A host task whose shape says what it issues can be priced on any device's host:

    direction   fwd or bwd           kernels   launched by the operator; 0 for a view
    modules     nn.Modules entered   nodes     autograd nodes entered
    tensors     of a list operator   update    1 in the optimizer, where gradients are off

    seconds = STEP · (modules·MODULE + nodes·NODE + own cost of the operator + tensors·EACH)

Constants are fitted by `benchmarks/fit_host.py` to 126 chains of calls timed on an H200's host (the
`host.*` rows of `tables/measured/h200.csv.gz`, torch 2.11): median error 7 % forward, 9 % backward;
those of optimizers are read off its rows, named beside each. A host is as fast as its launches:
another device's numbers are scaled by its `launch`. Two machines of one kind differ by 20 to 25 %.
"""

from __future__ import annotations

import numpy as np

from foretell.cost import shape as shapes
from foretell.cost.work import Work
from foretell.graph.columns import Array, Kind, Source

# A step's calls are not a chain of one kind: between them lies the model's own Python, and code and
# allocator are cold. Host-bound steps of GPT-2, BERT and Swin-T on such a machine took 0.97 to 1.56
# times what chains say, median 1.34 (benchmarks/measure_samples.py, torch 2.11).
STEP = 1.34
SIGMA = 0.25  # two machines of one kind, and chains of one operator are not a model
LAUNCH = 5e-6  # seconds of `Device.launch` that the constants below go with
MODULE = 2.6e-6
NODE = 7.9e-6
VIEW = (4.2e-6, 1.4e-6)  # forward from Python, backward inside C++
KERNEL = (12.8e-6, 9.5e-6)
FURTHER = 11e-6  # each kernel behind the first of an operator: the bias of module.conv2d_bias
UPDATE = 11.5e-6  # adam forloop: 88.6 µs a parameter, seven kernels
ON_HOST = 4.0e-6  # an operator on a CPU scalar: empty_tensor 3.8, a parameter's step count
LIST = 1.3e-6  # adam foreach: 16.5 µs a parameter over a dozen list operators
FUSED = 4.0e-6  # adam fused: 5.3 µs a parameter, the step counts among them
# Operators whose cost is not that of any kernel, forward and backward.
OWN: dict[str, tuple[float, float]] = {
    "addmm": (24.6e-6, 24.1e-6),
    "mm": (24.6e-6, 24.1e-6),
    "bmm": (19.6e-6, 22.7e-6),
    "baddbmm": (19.6e-6, 22.7e-6),
    "convolution": (28.6e-6, 28.6e-6),
    "convolution_backward": (49.0e-6, 49.0e-6),
    "native_batch_norm": (42.2e-6, 42.2e-6),
    "native_batch_norm_backward": (28.7e-6, 28.7e-6),
    "native_layer_norm": (22.9e-6, 22.9e-6),
    "native_layer_norm_backward": (14.6e-6, 14.6e-6),
    "native_group_norm": (50.1e-6, 50.1e-6),
    "native_dropout": (20.9e-6, 20.9e-6),
    "copy_": (14.9e-6, 12.3e-6),
    "embedding": (21.0e-6, 21.0e-6),
    "embedding_dense_backward": (26.4e-6, 26.4e-6),
    "cat": (18.5e-6, 12.9e-6),
    "sum": (16.5e-6, 12.1e-6),
    "index": (21.7e-6, 21.7e-6),
    "index_put": (72.6e-6, 72.6e-6),
    "_efficient_attention_forward": (32.8e-6, 32.8e-6),
    "_efficient_attention_backward": (74.0e-6, 74.0e-6),
    "_cudnn_attention_forward": (42.5e-6, 42.5e-6),
    "_cudnn_attention_backward": (45.6e-6, 45.6e-6),
    "_flash_attention_forward": (42.5e-6, 42.5e-6),
    "_flash_attention_backward": (45.6e-6, 45.6e-6),
}


class HostCalls:
    """Prices host tasks that say what they issue; passes all others."""

    name = "host calls"
    source = Source.FORMULA

    def price(self, work: Work) -> tuple[Array, Array]:
        seconds, sigma = np.full(len(work), np.nan), np.zeros(len(work))
        for r in np.flatnonzero(work.kind == Kind.HOST).tolist():
            if work.shape[r]:
                launch = work.cluster.devices[int(work.rank[r])].launch
                said = dict(shapes.parse(work.shape[r]))
                seconds[r] = host_seconds(work.op[r], said) * launch / LAUNCH
                sigma[r] = SIGMA
        return seconds, sigma


def host_seconds(op: str, said: dict[str, float]) -> float:
    """What issuing an operator takes on the host the constants are from."""
    own = _own(op, said)
    if said.get("update"):  # read off whole optimizer steps
        return own
    return STEP * (said.get("modules", 0.0) * MODULE + said.get("nodes", 0.0) * NODE + own)


def _own(op: str, said: dict[str, float]) -> float:
    way = int(said.get("direction", 0.0) > 0)
    tensors, launched = said.get("tensors", 0.0), said.get("kernels", 0.0)
    if tensors:
        each = FUSED if op.startswith("_fused") else LIST
        return KERNEL[0] + tensors * each
    if not launched:
        return ON_HOST if said.get("update") else VIEW[way]
    further = FURTHER * (launched - 1)
    if op in OWN:
        return OWN[op][way] + further
    return UPDATE if said.get("update") else KERNEL[way] + further
