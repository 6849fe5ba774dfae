"""Small mixed clusters for the tests, as files a person could write."""

from pathlib import Path

from foretell.cluster import Cluster, load

FAST = """
[[node]]
title = "fast"
count = {fast}
device = "v100-32"
devices = {each}
nic = "{nic}"
"""
SLOW = """
[[node]]
title = "slow"
count = {slow}
device = "p100-pcie"
devices = {each}
nic = "{nic}"
"""


def mixed(
    folder: Path,
    *,
    fast: int = 1,
    slow: int = 1,
    each: int = 2,
    nic: str = "ethernet-25g",
    flip: bool = False,
) -> Cluster:
    """V100 and P100 nodes on one switch; `flip` writes the slow ones first."""
    parts = [p.format(fast=fast, slow=slow, each=each, nic=nic) for p in (FAST, SLOW)]
    kept = [p for p, n in zip(parts, (fast, slow), strict=True) if n]
    path = folder / f"mixed-{fast}-{slow}-{each}-{flip}-{nic}.toml"
    path.write_text('name = "mixed"\n' + "".join(kept[::-1] if flip else kept))
    return load(str(path))


def searched(planner, workload, cluster):
    """What a planner finds, and the placement itself."""
    kept = []
    return planner.plan(workload, cluster, kept=kept), kept[0]
