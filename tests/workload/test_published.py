"""Built-in workloads have the parameters and products that were published for them."""

import pytest

from foretell.errors import InputError
from foretell.workload import FAMILIES, Workload, load
from foretell.workload.load import NAMED
from foretell.workload.workload import Exchange, calls

# torchvision's documentation: `num_params` and `GFLOPS` (multiply-adds of one forward)
VISION = {
    "alexnet": (61_100_840, 0.714),
    "densenet121": (7_978_856, 2.834),
    "densenet161": (28_681_000, 7.728),
    "densenet169": (14_149_480, 3.360),
    "densenet201": (20_013_928, 4.291),
    "efficientnet_b0": (5_288_548, 0.386),
    "efficientnet_b1": (7_794_184, 0.687),
    "efficientnet_b2": (9_109_994, 1.088),
    "efficientnet_b3": (12_233_232, 1.827),
    "efficientnet_b4": (19_341_616, 4.394),
    "efficientnet_b5": (30_389_784, 10.266),
    "efficientnet_b6": (43_040_704, 19.068),
    "efficientnet_b7": (66_347_960, 37.746),
    "inception_v3": (27_161_264, 5.713),
    "mobilenet_v2": (3_504_872, 0.301),
    "mobilenet_v3_large": (5_483_032, 0.217),
    "mobilenet_v3_small": (2_542_856, 0.057),
    "resnet18": (11_689_512, 1.814),
    "resnet34": (21_797_672, 3.664),
    "resnet50": (25_557_032, 4.089),
    "resnet101": (44_549_160, 7.801),
    "resnet152": (60_192_808, 11.514),
    "resnext50_32x4d": (25_028_904, 4.230),
    "resnext101_32x8d": (88_791_336, 16.414),
    "wide_resnet50_2": (68_883_240, 11.398),
    "wide_resnet101_2": (126_886_696, 22.753),
    "vgg11": (132_863_336, 7.609),
    "vgg13": (133_047_848, 11.308),
    "vgg16": (138_357_544, 15.470),
    "vgg19": (143_667_240, 19.632),
    "vgg16_bn": (138_365_992, 15.470),
    "vit_b_16": (86_567_656, 17.564),
    "vit_b_32": (88_224_232, 4.409),
    "vit_l_16": (304_326_632, 61.555),
    "vit_l_32": (306_535_400, 15.378),
    "swin_t": (28_288_354, 4.491),
    "swin_s": (49_606_258, 8.741),
    "swin_b": (87_768_224, 15.431),
}
# `num_parameters()` of the checkpoints' classes in Hugging Face transformers; papers where named
OTHERS = {
    "retinanet": 34_014_999,  # torchvision, retinanet_resnet50_fpn
    "unet": 859_520_964,  # diffusers, UNet2DConditionModel of Stable Diffusion 1.5
    "unet:text=1024,depth=64": 865_910_724,  # of Stable Diffusion 2.1
    "bert_base": 109_482_240,  # BertModel
    "bert_large": 335_141_888,
    "bert_small": 28_763_648,  # google/bert_uncased_L-4_H-512_A-8
    "bert:head=mlm": 109_514_298,  # BertForMaskedLM
    "bert:head=pretrain": 110_106_428,  # BertForPreTraining
    "gpt2": 124_439_808,
    "t5_small": 60_506_624,
    "t5_base": 222_903_552,
    "t5_large": 737_668_096,
    "mt5_small": 300_176_768,
    "mt5_base": 582_401_280,
    "mt5_large": 1_229_581_312,
    "mt5_xl": 3_742_619_648,
    "mt5_xxl": 12_921_057_280,
    "moe": 46_702_792_704,  # mistralai/Mixtral-8x7B-v0.1
    "unet3d": 19_069_955,  # Çiçek et al. 2016, section 2
}
# Published to a few digits only.
ROUNDED = {
    "dit": (675e6, 0.005),  # Peebles and Xie 2022, table 1: DiT-XL/2; positions are fixed
    "transformer_base": (
        65e6,
        0.035,
    ),  # Vaswani et al. 2017, table 3; "about 37000" words
    "transformer_big": (213e6, 0.01),
    "rnnlm": (66e6, 0.002),  # Zaremba et al. 2014
    "cosmoflow": (9.44e6, 0.001),  # Oyama et al. 2020, table 1
    "cosmoflow:size=512": (9.44e6, 0.001),
    "dlrm": (204_184_588 * 128, 0.001),  # the tables' rows × 128, networks besides
}


def multiply_adds(workload: Workload) -> float:
    """Of one forward, as PyTorch's flop counter sees it."""
    total = 0.0
    for layer in workload.layers:
        for op in layer.works():
            forward, _ = calls(op, op.sizes({}))
            work = sum(float(call.flops) * call.times for call in forward)
            total += layer.times * work * (op.when != "fused")
    return total / 2


@pytest.mark.parametrize("name", VISION)
def test_vision(name):
    parameters, products = VISION[name]
    workload = load(name)
    assert workload.parameters == parameters
    assert multiply_adds(workload) / 1e9 == pytest.approx(products, rel=0.01)


@pytest.mark.parametrize("name", OTHERS)
def test_parameters(name):
    assert load(name).parameters == OTHERS[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded(name):
    published, within = ROUNDED[name]
    assert load(name).parameters == pytest.approx(published, rel=within)


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in ("gpt", "decoder")] + list(NAMED))
def test_names_load_and_their_spec_gives_them_back(name):
    workload = load(name)
    assert load(workload.name) == workload
    assert workload.flops() > 2 * 2 * multiply_adds(workload) * 0.95  # backward is twice forward
    assert all(op.name for layer in workload.layers for op in layer.ops)


def test_weights_have_names_of_their_own():
    for name in (*VISION, *OTHERS):
        for layer in load(name).layers:
            names = [w.name for op in layer.works() for w in op.weights]
            assert len(names) == len(set(names)), (name, layer.name)


def test_unknown_names_offer_the_nearest():
    with pytest.raises(InputError, match="resnet50"):
        load("resnet5O")
    with pytest.raises(InputError, match="depth of a ResNet"):
        load("resnet:depth=51")
    with pytest.raises(InputError, match="not halved"):
        load("cosmoflow:size=100")
    with pytest.raises(InputError, match="whole patches"):
        load("vit:image=230")


def test_alike_blocks_are_one_layer():
    resnet = load("resnet152")
    assert max(layer.times for layer in resnet.layers) == 35
    assert resnet.num_blocks == 3 + 8 + 36 + 3


def test_splitting_an_image_leaves_its_share_of_the_pixels():
    conv = next(op for op in load("vgg16").layers[0].works() if op.kind == "conv")
    sizes = conv.sizes({"height": 4.0, "filter": 2.0}, 8.0)
    assert (sizes["h"], sizes["w"], sizes["k"], sizes["batch"]) == (56, 224, 32, 8)


def test_halos_are_as_wide_as_windows_reach():
    exchanges = [e for e in load("resnet50").layers[0].ops if isinstance(e, Exchange)]
    halo = next(e for e in exchanges if e.axis == "height" and e.forward == "send")
    assert halo.bytes({}, 1.0, "fp32") == 3 * 3 * 224 * 4  # channels × rows × width, window of 7


def test_filters_gather_and_channels_reduce():
    block = load("vgg16").layers[1]
    ways = {(e.axis, e.forward, e.backward) for e in block.ops if isinstance(e, Exchange)}
    assert {("filter", "all_gather", ""), ("filter", "", "all_reduce")} <= ways
    assert {("channel", "all_reduce", ""), ("channel", "", "all_gather")} <= ways


def test_limits_of_splits():
    vgg = load("vgg16")
    assert [vgg.most(axis) for axis in ("filter", "channel", "height")] == [64, 64, 14]
    assert load("cosmoflow").most("depth") == 64  # split in its first two layers
    assert load("cosmoflow:split=7").most("depth") == 2
