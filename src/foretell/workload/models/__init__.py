"""Families of models. `FAMILIES` is what `foretell.workload.load` knows by name."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, runtime_checkable

from foretell.spec import Spec
from foretell.workload.workload import Workload

# name -> (module here, class in it): loaded on first use, so that one family costs one file.
FAMILIES: dict[str, tuple[str, str]] = {
    "gpt": ("decoder", "Gpt"),
    "llama": ("decoder", "Llama"),
    "moe": ("decoder", "Moe"),
    "decoder": ("decoder", "Decoder"),
    "mamba": ("recurrent", "Mamba"),
    "bert": ("encoders", "Bert"),
    "transformer": ("seq2seq", "Transformer"),
    "t5": ("seq2seq", "T5"),
    "mt5": ("seq2seq", "Mt5"),
    "rnnlm": ("recurrent", "Rnnlm"),
    "vit": ("encoders", "Vit"),
    "flava": ("encoders", "Flava"),
    "swin": ("encoders", "Swin"),
    "resnet": ("convnets", "Resnet"),
    "vgg": ("convnets", "Vgg"),
    "alexnet": ("convnets", "Alexnet"),
    "densenet": ("convnets", "Densenet"),
    "inception_v3": ("convnets", "InceptionV3"),
    "mobilenet_v2": ("convnets", "MobilenetV2"),
    "mobilenet_v3": ("convnets", "MobilenetV3"),
    "efficientnet": ("convnets", "Efficientnet"),
    "retinanet": ("convnets", "Retinanet"),
    "dit": ("diffusion", "Dit"),
    "unet": ("diffusion", "Unet"),
    "cosmoflow": ("convnets", "Cosmoflow"),
    "unet3d": ("convnets", "Unet3d"),
    "dlrm": ("dlrm", "Dlrm"),
}


# What people call a member of a family, and the spec it is; further options are added to it.
NAMED: dict[str, str] = {
    **{f"resnet{n}": f"resnet:depth={n}" for n in (18, 34, 50, 101, 152)},
    "resnext50_32x4d": "resnet:depth=50,groups=32,base=4",
    "resnext101_32x8d": "resnet:depth=101,groups=32,base=8",
    "wide_resnet50_2": "resnet:depth=50,base=128",
    "wide_resnet101_2": "resnet:depth=101,base=128",
    **{f"vgg{n}": f"vgg:depth={n}" for n in (11, 13, 16, 19)},
    **{f"vgg{n}_bn": f"vgg:depth={n},norm=yes" for n in (11, 13, 16, 19)},
    **{f"densenet{n}": f"densenet:depth={n}" for n in (121, 161, 169, 201)},
    "mobilenet_v3_large": "mobilenet_v3",
    "mobilenet_v3_small": "mobilenet_v3:small=yes",
    **{f"efficientnet_b{n}": f"efficientnet:b={n}" for n in range(8)},
    "vit_b_16": "vit",
    "vit_b_32": "vit:patch=32",
    "vit_l_16": "vit:layers=24,hidden=1024,heads=16",
    "vit_l_32": "vit:layers=24,hidden=1024,heads=16,patch=32",
    "swin_t": "swin",
    "swin_s": "swin:blocks=2+2+18+2",
    "swin_b": "swin:width=128,blocks=2+2+18+2,heads=4+8+16+32",
    "bert_base": "bert",
    "bert_large": "bert:layers=24,hidden=1024,heads=16",
    "bert_small": "bert:layers=4,hidden=512,heads=8",
    "gpt2": "gpt:layers=12,hidden=768,heads=12,vocab=50257,positions=1024,tanh=yes",
    "transformer_base": "transformer",
    "transformer_big": "transformer:hidden=1024,heads=16,inner=4096",
    "t5_small": "t5",
    "t5_base": "t5:layers=12,hidden=768,heads=12,inner=3072",
    "t5_large": "t5:layers=24,hidden=1024,heads=16,inner=4096",
    "mt5_small": "mt5",
    "mt5_base": "mt5:layers=12,hidden=768,heads=12,inner=2048",
    "mt5_large": "mt5:layers=24,hidden=1024,heads=16,inner=2816",
    "mt5_xl": "mt5:layers=24,hidden=2048,heads=32,inner=5120",
    "mt5_xxl": "mt5:layers=24,hidden=4096,heads=64,inner=10240",
}


@runtime_checkable
class Family(Protocol):
    """A model family: a spec that makes a workload."""

    def workload(self) -> Workload: ...


def family(name: str) -> type[Spec]:
    """The class of a family; a KeyError where it is unknown."""
    module, kind = FAMILIES[name]
    found: type[Spec] = getattr(import_module(f"foretell.workload.models.{module}"), kind)
    return found
