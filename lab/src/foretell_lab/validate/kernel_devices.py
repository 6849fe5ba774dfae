"""Which device a truth file means by a name, as a preset or, for old boards, as given here.

Unknown names are matched by the words of the presets' titles; a name that fits none gives None, and
the caller leaves its rows out.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from foretell.cluster.node import Device
from foretell.cluster.read import devices

# Names in truth/kernels that do not say their preset.
_NAMES = {
    "Tesla P100-PCIE-16GB": "p100-pcie",
    "Tesla V100-PCIE-32GB": "v100-pcie",
    "NVIDIA A100-PCIE-40GB": "a100-40-pcie",
    "NVIDIA A100 80GB PCIe": "a100-80-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NV_V100": "v100-16",  # DeepBench reaches 14.8 Tflop/s in fp32: more than the PCIe board's peak
    "NV_P100": "p100-pcie",  # DeepBench never exceeds 9.1 Tflop/s: 98 % of the PCIe board's peak
    "NV_T4": "t4",
    "NV_1080Ti": "1080ti",
    "NV_TitanXp": "titan-xp",
}


@cache
def _extra() -> dict[str, Device]:
    """Boards of DeepBench and NeuSight that are no presets."""
    maxwell = replace(
        devices()["titan-xp"],
        name="m40",
        title="NVIDIA Tesla M40",
        arch="maxwell",
        memory_bandwidth=288e9,
        flops={"fp32": 6.83e12},
        units=24,
        clock=1.112e9,
        sources={"all": "NVIDIA Tesla M40 data sheet, 2015: 3072 cores, boost clock"},
    )
    titan = replace(
        maxwell,
        name="titan-x",
        title="NVIDIA GeForce GTX TITAN X",
        memory_bandwidth=336.5e9,
        flops={"fp32": 6.6e12},
        clock=1.075e9,
        sources={"all": "NVIDIA GeForce GTX TITAN X specifications, 2015"},
    )
    pascal = replace(
        devices()["titan-xp"],
        name="titan-x-pascal",
        title="NVIDIA TITAN X (Pascal)",
        memory_bandwidth=480e9,
        flops={"fp32": 10.97e12},
        units=28,
        clock=1.531e9,
        sources={"all": "NVIDIA TITAN X specifications, 2016"},
    )
    vega = replace(
        devices()["mi100"],
        name="mi25",
        title="AMD Radeon Instinct MI25",
        arch="vega",
        memory_bandwidth=484e9,
        flops={"fp32": 12.3e12, "fp16": 24.6e12},
        units=64,
        clock=1.5e9,
        l2=4 * 2.0**20,
        sources={"all": "AMD Radeon Instinct MI25 data sheet, 2017"},
    )
    frontier = replace(
        vega,
        name="vega-fe",
        title="AMD Radeon Vega Frontier Edition",
        flops={"fp32": 13.1e12, "fp16": 26.2e12},
        clock=1.6e9,
        sources={"all": "AMD Radeon Vega Frontier Edition specifications, 2017"},
    )
    mi210 = replace(
        devices()["mi250"],
        name="mi210",
        title="AMD Instinct MI210",
        watts=300.0,
        sources={"all": "AMD Instinct MI210 data sheet, 2022"},
    )
    return {
        "NV_M40": maxwell,
        "NV_TitanX": titan,
        "NV_TitanX_Pascal": pascal,
        "AMD_MI25": vega,
        "AMD_VegaFE": frontier,
        "AMD Instinct MI210": mi210,
    }


@cache
def device_named(name: str) -> Device | None:
    """The device a truth file means, or None where it is unknown."""
    if name in _extra():
        return _extra()[name]
    if name in _NAMES:
        return devices()[_NAMES[name]]
    said = _words([name])
    models = ((key, words, _model(words)) for key, words in _titles().items())
    found = [(len(words & said), key) for key, words, model in models if model and model <= said]
    return devices()[max(found)[1]] if found else None


@cache
def _titles() -> dict[str, frozenset[str]]:
    return {key: _words([device.title]) for key, device in devices().items()}


def _words(names: Iterable[str]) -> frozenset[str]:
    text = " ".join(names).lower().replace("_", " ").replace("-", " ")
    return frozenset(re.findall(r"[a-z0-9]+", text))


def _model(words: frozenset[str]) -> frozenset[str]:
    """The words that tell one board from another: those with a digit that are no memory size."""
    marked = {w for w in words if any(c.isdigit() for c in w) and not w.endswith("gb")}
    return frozenset(marked - {"sxm2", "sxm4", "sxm5"})


# Boards that are the same chip in another package: leaving one out of a fit leaves out all.
CHIPS = {
    "v100-16": "V100",
    "v100-pcie": "V100",
    "p100": "P100",
    "p100-pcie": "P100",
    "a100-40": "A100",
    "a100-80": "A100",
    "a100-40-pcie": "A100",
    "a100-80-pcie": "A100",
    "h100": "H100/H200",
    "h200": "H100/H200",
    "1080ti": "GP102",
    "titan-xp": "GP102",
    "titan-x-pascal": "GP102",
    "m40": "GM200",
    "titan-x": "GM200",
    "mi25": "Vega10",
    "vega-fe": "Vega10",
    "mi210": "MI200",
    "mi250": "MI200",
}


def chip(device: Device) -> str:
    """What is left out together."""
    return CHIPS.get(device.name, device.name.upper())
