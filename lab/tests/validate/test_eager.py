"""A step as PyTorch issues it: what runs, what it computes, what it holds."""

import numpy as np
import pytest

from foretell.cluster import load as load_cluster
from foretell.cost import price
from foretell.graph import Kind, Phase
from foretell.simulate import simulate
from foretell.simulate.memory import peak_bytes
from foretell.workload import load
from foretell.workload.workload import holds
from foretell_lab.validate.eager import Eager, eager


def kernels(graph, **wanted):
    mine = graph.kind == Kind.KERNEL
    for name, value in wanted.items():
        mine &= getattr(graph, name) == value
    return np.flatnonzero(mine)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit_b_32", "swin_t", "unet3d"])
def test_all_products_are_there(name):
    workload = load(name)
    graph = eager(workload, Eager(flash=False), batch=4)
    assert graph.flops.sum() == pytest.approx(workload.flops(4.0), rel=1e-9)


def test_phases_follow_one_another():
    graph = eager(load("resnet18"), batch=2)
    phases = graph.phase[kernels(graph)]
    order = [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.UPDATE]
    assert [p for i, p in enumerate(phases) if not i or phases[i - 1] != p] == order


def test_every_kernel_is_launched_by_the_host():
    graph = eager(load("vgg11"), batch=2)
    for i in kernels(graph).tolist():
        assert any(graph.kind[j] == Kind.HOST for j in graph[i].after)


def test_autocast_computes_in_halves_and_casts_weights():
    plain, amp = (eager(load("resnet18"), Eager(amp=a), batch=2) for a in ("", "fp16"))
    convs = sum(op.kind == "conv" for layer in load("resnet18").layers for op in layer.works())
    assert len(kernels(amp)) >= len(kernels(plain)) + 2 * convs
    named = [amp[i].dtype for i in kernels(amp).tolist() if amp[i].op == "conv"]
    assert set(named) == {"fp16"}


def test_a_fused_optimizer_is_few_kernels():
    loop, fused = (eager(load("resnet18"), Eager(way=w), batch=2) for w in ("loop", "fused"))
    assert len(kernels(loop, phase=Phase.UPDATE)) == 3 * 62  # momentum; 62 parameter tensors
    assert len(kernels(fused, phase=Phase.UPDATE)) == 1


def test_memory_grows_with_the_batch_above_what_stays():
    graphs = [eager(load("resnet18"), Eager(optimizer="adam"), batch=b) for b in (8, 16)]
    peaks = [peak_bytes(simulate(price(g, load_cluster("v100-16:gpus=1")))) for g in graphs]
    stays = 3 * 4 * load("resnet18").parameters
    assert stays < peaks[0] < peaks[1] < 2 * peaks[0]


def test_channels_last_halves_are_quicker_where_images_are_turned_otherwise():
    cluster = load_cluster("a100-80:gpus=1")
    runs = [Eager(amp="fp16", nhwc=last) for last in (False, True)]
    first, last = (simulate(price(eager(load("resnet50"), r, batch=256), cluster)) for r in runs)
    assert last.seconds < 0.8 * first.seconds


def test_conditions_may_be_joined():
    assert holds("!fused&!eager", frozenset())
    assert not holds("!fused&!eager", frozenset({"eager"}))
    assert holds("amp&nhwc", frozenset({"amp", "nhwc"}))
    assert not holds("amp&nhwc", frozenset({"amp"}))
