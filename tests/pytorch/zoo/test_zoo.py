"""Models of many kinds: captured, their flop as torch counts them, their memory as it is measured.

A few run every time; all of them, those of other libraries too, with `make zoo`.
"""

import pytest

from tests.pytorch.zoo import geometric, images, plain, transformers
from tests.pytorch.zoo.check import checked

FAST = ("Gru", "PackedLstm", "ExpertLoop", "ExpertGroups", "Detector", "UNet3d", "LayerDrop")
CASES = {case.name: case for case in plain.CASES}


@pytest.mark.parametrize("name", FAST)
def test_flops_and_peak_memory_are_those_of_a_real_step(name):
    found = checked(CASES[name])
    assert abs(found.flops_error) <= 0.02, found
    assert abs(found.peak_error) <= 0.05, found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in FAST])
def test_every_plain_model(name):
    found = checked(CASES[name])
    assert abs(found.flops_error) <= 0.02, found
    assert abs(found.peak_error) <= 0.05, found


@pytest.mark.slow
@pytest.mark.parametrize("case", geometric.CASES, ids=str)
def test_every_graph_network(case):
    pytest.importorskip("torch_geometric")
    assert abs(checked(case).flops_error) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("case", transformers.CASES, ids=str)
def test_every_model_of_transformers(case):
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert abs(checked(case).flops_error) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("case", [*images.TIMM_CASES, *images.TORCHVISION_CASES], ids=str)
def test_every_model_of_timm_and_torchvision(case):
    package = "timm" if case.name.startswith("timm") else "torchvision"
    pytest.importorskip(package, reason=f"{package} is not installed")
    assert abs(checked(case).flops_error) <= 0.02


def test_the_zoo_has_sixty_models():
    cases = [*plain.CASES, *geometric.CASES, *transformers.CASES]
    cases += [*images.TIMM_CASES, *images.TORCHVISION_CASES]
    assert len({case.name for case in cases}) == len(cases) >= 60
