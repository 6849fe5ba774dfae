"""Linear layers in fp8, on the CPU, which computes them slowly."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from foretell.cluster.read import load
from foretell.errors import InputError
from foretell.pytorch.deploy import precision
from foretell.pytorch.deploy.precision import require_fp8, require_layers, use_fp8

E4M3, E5M2 = 2**-4, 2**-3  # half of the last digit


@pytest.mark.parametrize("shape", [(7, 32), (2, 5, 32)])
def test_a_layer_in_fp8_is_the_layer_to_its_last_digits(shape):
    torch.manual_seed(0)
    plain, short = nn.Linear(32, 48), nn.Linear(32, 48)
    short.load_state_dict(plain.state_dict())
    use_fp8(short)
    x = torch.randn(shape)
    found = []
    for layer in (plain, short):
        one = x.clone().requires_grad_()
        y = layer(one)
        (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        found.append((y.float(), one.grad, layer.weight.grad, layer.bias.grad))
    for place, (wanted, mine) in enumerate(zip(*found, strict=True)):
        off = (wanted - mine).abs().max() / wanted.abs().max()
        assert 0 < off < (E5M2 if 0 < place < 3 else E4M3)


def test_layers_of_other_sizes_stay_as_they_are():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16))
    use_fp8(model)
    assert ["forward" in vars(m) for m in model] == [False, True]
    with pytest.raises(InputError, match="multiples of 16"):
        require_layers(model[0])


def test_layers_that_gain_nothing_by_fp8_compute_as_they_did():
    h200 = load("h200:gpus=1").devices[0]
    wide, short = nn.Linear(8192, 8192, device="meta"), nn.Linear(768, 768)
    assert precision._Forward(wide, h200)._is_faster(16384)
    assert not precision._Forward(short, h200)._is_faster(64)
    x = torch.randn(64, 768)
    assert torch.equal(precision._Forward(short, h200)(x), short(x))
    model = nn.Sequential(short, nn.Linear(32, 32))
    assert precision.fp8_notes(model) == []
    model[0].forward = precision._Forward(short, h200)
    model[0](x)
    (note,) = precision.fp8_notes(model)
    assert note.startswith("0 of 1 linear layers run in fp8")


def test_a_run_in_fp8_needs_a_device_that_has_it():
    with pytest.raises(InputError, match="the CPU has no fp8 matmuls"):
        require_fp8("fp8", "cpu")
    require_fp8("bf16", "cpu")
