"""The published formulas of ParaDL, against numbers its oracle printed."""

import pytest

from foretell.errors import InputError
from foretell.workload import load
from foretell_lab.validate.paradl_formulas import Fabric, Question, net_of, paradl
from foretell_lab.validate.paradl_nets import NETS

OLD = Fabric(cable=15e-6)
# network, strategy, ranks, batch, (compute, communication) of an epoch
LOGS = [
    ("RESNET50", "data", 16, 1024, (249.560, 18.187)),
    ("RESNET50", "data", 64, 4096, (62.390, 5.678)),
    ("RESNET50", "data", 256, 16384, (15.598, 2.393)),
    ("RESNET50", "data", 1024, 65536, (3.899, 1.558)),
    ("VGG", "data", 16, 512, (659.647, 256.975)),
    ("VGG", "data", 512, 16384, (20.614, 11.070)),
    ("RESNET50", "filter", 4, 64, (1150.4, 2175.2)),
    ("RESNET50", "channel", 32, 64, (321.4, 13590.6)),
    ("RESNET50", "filter", 64, 64, (262.2, 16616.8)),
    ("VGG", "channel", 64, 32, (534.9, 19839.7)),
]


@pytest.mark.parametrize(("net", "strategy", "ranks", "batch", "said"), LOGS)
def test_outputs(net, strategy, ranks, batch, said):
    answer = paradl(strategy, Question(NETS[net](), OLD, ranks, batch))
    assert (answer.compute, answer.communication) == pytest.approx(said, rel=1e-3)


def test_memory():
    assert paradl("data", Question(NETS["RESNET50"](), OLD, 4, 256)).memory == 15_434_845_696
    assert paradl("data", Question(NETS["VGG"](), OLD, 4, 128)).memory == 9_360_484_864


def test_sums_of_the_networks():
    resnet, vgg = NETS["RESNET50"](), NETS["VGG"]()
    assert (resnet.weights, vgg.weights) == (22_734_016, 169_801_408)
    assert (resnet.held, vgg.held) == (14_971_596 + 14_819_368, 15_705_164 + 15_552_936)


def test_hybrids_share_a_cable():
    alone = paradl("data+filter", Question(NETS["RESNET50"](), Fabric(flows=1.0), 32, 512))
    shared = paradl("data+filter", Question(NETS["RESNET50"](), Fabric(), 32, 512))
    assert shared.compute == alone.compute
    assert shared.communication > alone.communication


def test_pipelines_fill():
    few, many = (
        paradl("pipeline", Question(NETS["VGG"](), OLD, 4, 512, segments=s)).compute
        for s in (1, 64)
    )
    assert many < 0.5 * few


def test_a_workload_in_the_oracles_terms():
    net = net_of(load("vgg16:image=226,up=yes"), 8.2456e-3)
    assert sum(p.y for p in net.split) == sum(p.y for p in NETS["VGG"]().split)
    assert sum(p.weights for p in net.split) == sum(p.weights for p in NETS["VGG"]().split)
    assert net.share > 0.95


def test_unknown_strategy():
    with pytest.raises(InputError, match="data\\+filter"):
        paradl("data+filters", Question(NETS["VGG"](), OLD, 4, 128))
