"""Built-in workloads and captures of the same models agree."""

import pytest

from foretell.cluster import load as load_cluster
from foretell.cost import price
from foretell.simulate import simulate
from foretell.workload import load
from foretell_lab.validate.eager import Eager, eager
from foretell_lab.validate.workload_names import H200
from foretell_lab.validate.workloads import with_options

pytest.importorskip("torch")
MODELS = {
    "resnet50": ("momentum", 64),
    "vgg16": ("momentum", 64),
    "mobilenet_v3_large": ("momentum", 128),
}
MODELS |= {"bert_base": ("adam", 32), "gpt2": ("adam", 8)}
PRODUCTS = ("mm", "bmm", "addmm", "convolution", "convolution_backward")


SOME = ("resnet50", "gpt2")  # the others are slow together


@pytest.mark.parametrize(
    "name", [n if n in SOME else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_agree(name):
    from foretell_lab.validate.capture import captured

    optimizer, batch = MODELS[name]
    workload = load(with_options(H200[name], dtype="fp32"))
    cluster = load_cluster("h200:gpus=1")
    theirs = captured(name, "base", batch)
    ours = eager(workload, Eager(optimizer=optimizer, way="loop"), batch=batch)
    products = sum(t.flops for t in theirs if t.op in PRODUCTS)
    mine = sum(t.flops for t in ours if t.op in ("gemm", "conv", "conv_dgrad", "conv_wgrad"))
    assert mine == pytest.approx(products, rel=0.01)
    steps = [simulate(price(graph, cluster)).seconds for graph in (theirs, ours)]
    assert steps[1] == pytest.approx(steps[0], rel=0.05)
