"""Models and machines that a network is trained on, and those it never sees.

Whole families are kept out: of models, and of machines those with a device of another kind.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import NamedTuple

from foretell.cluster import Cluster, load
from foretell.errors import ForetellError
from foretell.search.placement.problem import problem
from foretell.search.placement.search import Evaluator
from foretell.workload import load as load_workload

# family: specs of some members, and samples a device may have
TRAINED: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "vgg": (("vgg11", "vgg13", "vgg16", "vgg16_bn", "vgg19"), (2, 4, 8, 16, 32)),
    "resnet": (("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"), (2, 4, 8, 16, 32)),
    "alexnet": (("alexnet",), (4, 8, 16, 32, 64)),
    "densenet": (("densenet121",), (4, 8, 16)),
    "vit": (("vit_b_16", "vit:layers=6,hidden=512,heads=8", "vit_l_16"), (2, 4, 8, 16)),
    "bert": (
        (
            "bert_small", "bert:head=mlm", "bert:layers=6,hidden=768,heads=12,head=mlm",
            "bert:layers=4,hidden=1024,heads=16,vocab=305220,head=mlm",
            "bert_large:vocab=30522,head=mlm", "bert:layers=16,hidden=1024,heads=16,head=mlm",
        ),
        (1, 2, 4, 8),
    ),
}  # fmt: skip
UNSEEN: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "inception": (("inception_v3",), (4, 8, 16)),
    "transformer": (("transformer", "t5:layers=6", "transformer:layers=3"), (4, 16, 37)),
    "gpt": (("gpt2:dtype=fp32", "gpt:layers=8,hidden=512,heads=8,seq=256,dtype=fp32"), (1, 2, 4)),
    "efficientnet": (("efficientnet_b0", "efficientnet_b3"), (4, 8, 16)),
    "mobilenet": (("mobilenet_v2", "mobilenet_v3_large"), (8, 16, 32)),
    "swin": (("swin_t",), (2, 4, 8)),
    "rnnlm": (("rnnlm",), (4, 8, 16)),
}
TRAINED_DEVICES = ("v100-32", "1080ti", "t4", "2080ti", "a10g", "titan-rtx")
UNSEEN_DEVICES = ("p100-pcie", "k80", "a100-40-pcie", "titan-v", "a4000")


class World(NamedTuple):
    """A model on machines."""

    name: str
    on: Evaluator


def written(name: str, groups: list[tuple[str, int, int, float]], between: float) -> Cluster:
    """A cluster of (device, devices of a node, nodes, GB/s inside) with GB/s between nodes."""
    lines = [f'name = "{name}"', "[link.net]", 'kind = "ethernet"']
    lines += [f'bandwidth = "{between} GB/s"', 'latency = "6 us"', 'switch = "0.5 us"']
    for width in sorted({w for *_, w in groups}):
        lines += [f'[link."in{width}"]', 'kind = "pcie"', f'bandwidth = "{width} GB/s"']
        lines += ['latency = "0.5 us"']
    for device, many, nodes, width in groups:
        lines += ["[[node]]", f"count = {nodes}", f'device = "{device}"', f"devices = {many}"]
        lines += [f'pcie = "in{width}"', 'nic = "net"']
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.toml"
        path.write_text("\n".join(lines))
        return load(str(path))


def cluster(draw: random.Random, kinds: tuple[str, ...], most: int = 16) -> Cluster:
    """Two to four groups of devices, one to four nodes each; links of 10 to 100 Gb/s."""
    groups: list[tuple[str, int, int, float]] = []
    total = 0
    for device in draw.sample(kinds, draw.choice((2, 2, 3, 4))):
        many, nodes = draw.choice((1, 2, 3, 4, 6, 8)), draw.choice((1, 1, 1, 2, 4))
        least = 2 if not groups else 0  # room that is left for another kind
        while total + many * nodes > most - least:
            many, nodes = max(1, many // 2), 1
        if total + many * nodes <= most:
            groups.append((device, many, nodes, draw.choice((3.0, 8.0, 12.0, 20.0))))
            total += many * nodes
        if total == most:
            break
    return written("drawn", groups, draw.choice((1.25, 1.3, 2.81, 5.0, 12.5)))


def world(seed: int, *, unseen: bool = False) -> World:
    """A model and machines at random; of families that are kept out with `unseen`."""
    draw = random.Random(f"{seed} {unseen}")
    models, kinds = (UNSEEN, UNSEEN_DEVICES) if unseen else (TRAINED, TRAINED_DEVICES)
    while True:
        specs, batches = models[draw.choice(sorted(models))]
        spec, each = draw.choice(specs), draw.choice(batches)
        text = f"{spec}{',' if ':' in spec else ':'}batch={each}"
        machines = cluster(draw, kinds)
        try:
            on = Evaluator(problem(load_workload(text), machines))
            return World(f"{text} on {title(machines)}", on)
        except ForetellError:  # a model that cannot be on such machines: the next one
            continue


def title(machines: Cluster) -> str:
    """Devices in words."""
    counts: dict[str, int] = {}
    for device in machines.devices:
        counts[device.name] = counts.get(device.name, 0) + 1
    return " + ".join(f"{n} {name}" for name, n in counts.items())
