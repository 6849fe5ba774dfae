"""Models of timm and torchvision, made from their names without weights."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pytorch.zoo.case import Case


def of_timm(name: str, **options: Any) -> nn.Module:
    made: nn.Module = import_module("timm").create_model(name, num_classes=10, **options)
    return made


def of_torchvision(kind: str, name: str, **options: Any) -> nn.Module:
    made: nn.Module = getattr(import_module(f"torchvision.models{kind}"), name)(
        weights=None, num_classes=10, **options
    )
    return made


def images(side: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, side, side), torch.randint(0, 10, (2,))


def clips() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 4, 48, 48), torch.randint(0, 10, (2,))


def maps() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 96, 96), torch.randint(0, 10, (2, 96, 96))


def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    found = model(given[0])
    return F.cross_entropy(found["out"] if isinstance(found, dict) else found, given[1])


TIMM = [
    "resnet18", "resnetv2_50", "convnext_atto", "efficientnet_b0", "mobilenetv3_small_100",
    "regnety_002", "densenet121", "edgenext_xx_small", "mobilevit_xxs", "poolformer_s12",
    "repvgg_a0", "ghostnet_100", "hrnet_w18_small", "vovnet39a", "dla34",
]  # fmt: skip
WIDE = [
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224",
    "mixer_s32_224", "levit_128s", "cait_xxs24_224", "xcit_nano_12_p16_224", "pit_ti_224",
]  # fmt: skip
TORCHVISION = [
    "resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "shufflenet_v2_x0_5",
    "squeezenet1_1", "densenet121", "mnasnet0_5", "regnet_y_400mf", "convnext_tiny", "swin_t",
]  # fmt: skip
TIMM_CASES = [
    *[Case(f"timm-{name}", partial(of_timm, name), partial(images, 64), loss) for name in TIMM],
    *[Case(f"timm-{name}", partial(of_timm, name), partial(images, 224), loss) for name in WIDE],
]
TORCHVISION_CASES = [
    *[
        Case(f"tv-{name}", partial(of_torchvision, "", name), partial(images, 64), loss)
        for name in TORCHVISION
    ],
    Case("tv-r3d_18", partial(of_torchvision, ".video", "r3d_18"), clips, loss),
    Case(
        "tv-lraspp",
        partial(
            of_torchvision, ".segmentation", "lraspp_mobilenet_v3_large", weights_backbone=None
        ),
        maps,
        loss,
    ),
    Case(
        "tv-fcn_resnet50",
        partial(of_torchvision, ".segmentation", "fcn_resnet50", weights_backbone=None),
        maps,
        loss,
    ),
]
