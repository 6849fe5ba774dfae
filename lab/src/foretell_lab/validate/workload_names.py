"""Names of models and machines in tables of measurements, as foretell names them."""

from __future__ import annotations

import re

# The models of `h200/`, as they were measured: a head of masked words, 512 words, 26 equal tables.
H200 = {
    "resnet50": "resnet50",
    "vgg16": "vgg16",
    "mobilenet_v3_large": "mobilenet_v3_large",
    "bert_base": "bert:head=mlm",
    "gpt2": "gpt2:seq=512",
    "swin_t": "swin_t",
    "dlrm": "dlrm:tables=26,rows=200000,dim=64,bottom=512+256+64,top=1024+1024+512+1",
}
# DeepLearningExamples: the device, and the machine it stands in
MACHINES = {
    "V100 16GB": ("v100-16", "dgx-1-v100"),
    "V100 32GB": ("v100-32", "dgx-1-v100-32"),
    "V100 32GB (DGX-2)": ("v100-32", "dgx-2"),
    "A100 80GB": ("a100-80", "dgx-a100"),
    "A100 40GB": ("a100-40", "dgx-a100-40"),
}
_NVIDIA = {
    "resnet50v1.5": "resnet50",
    "RN50v1.5": "resnet50",
    "resnext101-32x4d": "resnet:depth=101,groups=32,base=4",
    "se-resnext101-32x4d": "resnet:depth=101,groups=32,base=4,squeeze=yes",
    "efficientnet-b0": "efficientnet_b0",
    "efficientnet-b4": "efficientnet_b4",
}
# Boards of Lambda's table, and whether their fp32 matmuls are TF32
BOARDS = {
    "1080ti": False,
    "2080ti": False,
    "titan-rtx": False,
    "rtx-8000": False,
    "v100-16": False,
    "3070": True,
    "3080": True,
    "3090": True,
    "4090": True,
    "a4000": True,
    "a5000": True,
    "a6000": True,
    "a40": True,
    "a100-40-pcie": True,
    "a100-40": True,
    "a100-80-pcie": True,
    "a100-80": True,
    "h100-pcie": True,
    "h100": True,
    "h200": True,
}
_BOARD_WORDS = (
    (r"1080Ti", "1080ti"),
    (r"2080Ti", "2080ti"),
    (r"TitanRTX", "titan-rtx"),
    (r"QuadroRTX[68]000(_v1)?|LambdaCloud_1xQuadroRTX6000", "rtx-8000"),
    (r"V100|LambdaCloud_V100_16GB_v1", "v100-16"),
    (r"(3070|3080|3090|4090)(_v1)?", r"\1"),
    (r"(A4000|A5000|A6000|A40)(_v1)?", r"\1"),
    (r"A100_PCIe|LambdaCloud_A100_40GB_PCIe_v1", "a100-40-pcie"),
    (r"A100_(SXM4|p4|40GB_SXM4_v1)", "a100-40"),
    (r"A100_80GB_PCIe(_v1)?", "a100-80-pcie"),
    (r"A100_80GB_SXM4(_v1)?", "a100-80"),
    (r".*H100_80GB_PCIe5?_.*", "h100-pcie"),
    (r".*H100_80GB_SXM5_.*", "h100"),
    (r".*1xH200_140GB_SXM_.*", "h200"),
)
_VIT = {
    "tiny": "layers=12,hidden=192,heads=3",
    "small": "layers=12,hidden=384,heads=6",
    "base": "layers=12,hidden=768,heads=12",
    "large": "layers=24,hidden=1024,heads=16",
    "huge": "layers=32,hidden=1280,heads=16",
}
_SWIN = {
    "tiny": "width=96,blocks=2+2+6+2,heads=3+6+12+24",
    "small": "width=96,blocks=2+2+18+2,heads=3+6+12+24",
    "base": "width=128,blocks=2+2+18+2,heads=4+8+16+32",
    "large": "width=192,blocks=2+2+18+2,heads=6+12+24+48",
}
_STEMS = {"b": "", "c": ",deep=yes", "d": ",deep=yes,pooled=yes"}


def board_of(name: str) -> str:
    """The preset of a board in Lambda's words; empty where there is none."""
    for pattern, board in _BOARD_WORDS:
        found = re.fullmatch(pattern, name)
        if found:
            return found.expand(board).lower()
    return ""


def nvidia_spec(model: str) -> str:
    """The spec of a DeepLearningExamples folder; empty where no family makes it."""
    framework, _, name = model.partition("/")
    return _NVIDIA.get(name.rsplit("/", 1)[-1], "") if framework in ("PyTorch", "MxNet") else ""


def timm_spec(name: str) -> str:
    """The spec of a timm model; empty where no family makes it.

    Weights trained elsewhere (`tv_`, `swsl_` …) change nothing; ports from TensorFlow (`tf_`) pad
    images unevenly, which takes further kernels: they are other models.
    """
    name = re.sub(r"^(tv_|swsl_|ssl_|ig_|gluon_|adv_)", "", name)
    for rule in (_resnet, _plain, _mobile, _vit, _swin):
        spec = rule(name)
        if spec:
            return spec
    return ""


def _resnet(name: str) -> str:
    if m := re.fullmatch(r"(se)?resnet(18|26|34|50|101|152|200)(d)?", name):
        return f"resnet:depth={m[2]}" + _squeezed(m[1]) + _STEMS[m[3] or "b"]
    if m := re.fullmatch(r"resnet(\d+)_v1([bcd])", name):
        return f"resnet:depth={m[1]}{_STEMS[m[2]]}"
    if m := re.fullmatch(r"(se)?resnext(26|50|101)(d)?_(\d+)x(\d+)d", name):
        wide = f"resnet:depth={m[2]},groups={m[4]},base={m[5]}"
        return wide + _squeezed(m[1]) + _STEMS[m[3] or "b"]
    m = re.fullmatch(r"wide_resnet(\d+)_2", name)
    return f"resnet:depth={m[1]},base=128" if m else ""


def _squeezed(word: str | None) -> str:
    return ",squeeze=yes" if word else ""


def _plain(name: str) -> str:
    if re.fullmatch(r"vgg(11|13|16|19)(_bn)?|densenet(121|161|169|201)", name):
        return name
    return "inception_v3:aux=no" if name == "inception_v3" else ""


def _mobile(name: str) -> str:
    if m := re.fullmatch(r"mobilenetv2_(\d)(\d\d)", name):
        return f"mobilenet_v2:width={m[1]}.{m[2]}"
    if m := re.fullmatch(r"mobilenetv3_(small|large)_(\d)(\d\d)", name):
        small = "yes" if m[1] == "small" else "no"
        return f"mobilenet_v3:width={m[2]}.{m[3]},small={small}"
    m = re.fullmatch(r"efficientnet_b([0-7])a?", name)
    return f"efficientnet:b={m[1]}" if m else ""


def _vit(name: str) -> str:
    pattern = r"(?:vit|deit)_(tiny|small|base|large|huge)(_distilled)?_patch(\d+)_\d+(_sam)?"
    m = re.fullmatch(pattern, name)
    if not m:
        return ""
    return f"vit:{_VIT[m[1]]},patch={m[3]}" + (",extra=2" if m[2] else "")


def _swin(name: str) -> str:
    m = re.fullmatch(r"swin_(tiny|small|base|large)_patch4_window(\d+)_\d+", name)
    return f"swin:{_SWIN[m[1]]},window={m[2]}" if m else ""
