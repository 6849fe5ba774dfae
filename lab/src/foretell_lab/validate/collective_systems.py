"""The machines behind the measured collectives: what each source says of its links, as levels.

Bandwidths are bytes/s in one direction: NVLink and NICs from data sheets, PCIe as NCCL counts it
(topo.h: 12 GB/s for 16 lanes of generation 3, twice that for each next), which also bounds a NIC.
Where a source does not name its network, the rate is read from that system's own runs, and the line
says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from foretell.cluster.node import Level
from foretell.errors import UnmodelledError

GIGA = 1e9
HDR, NDR = 24 * GIGA, 48 * GIGA  # InfiniBand of 200 and 400 Gb/s behind PCIe 4 and 5


@dataclass(frozen=True)
class Net:
    """What joins nodes."""

    kind: str
    bandwidth: Callable[[int], float]  # of a whole node, by how many of its ranks take part
    nics: int  # of which a rank drives one; 0 where `bandwidth` already knows


@dataclass(frozen=True)
class Machine:
    """A node and its network."""

    chip: str  # volta, ampere, hopper, blackwell: which NICs are of its time
    kind: str
    bandwidth: Callable[[int], float]  # of one rank, by how many ranks of the node take part
    ranks: int = 8  # in a node
    pair: Level | None = None  # set where ranks are bridged two by two below `kind`
    net: Net | None = None

    def levels(self, per_node: int, nodes: int) -> tuple[Level, ...]:
        """The levels of a group of `nodes` nodes with `per_node` ranks each."""
        found = self._inside(per_node, nodes)
        if nodes > 1:
            net = self.net or Net("infiniband", lambda _: 8 * HDR, 8)
            found += (Level(net.kind, (nodes,), net.bandwidth(per_node), 0.0, max(net.nics, 1)),)
        return found

    def _inside(self, per_node: int, nodes: int) -> tuple[Level, ...]:
        if not self.pair:
            speed = self.bandwidth(per_node)
            return (Level(self.kind, (per_node,) * nodes, speed, 0.0, 1),)
        pairs = max(1, per_node // 2)
        bridge = replace(self.pair, sizes=(min(per_node, 2),) * (pairs * nodes))
        return bridge, Level(self.kind, (pairs,) * nodes, self.bandwidth(per_node), 0.0, 1)


def _mesh(ranks: int) -> float:
    """Rings that NVLink closes among the first GPUs of a DGX-1V cube mesh, 25 GB/s each.

    GPUs 0–3 have 1, 1 and 2 links to each other and 2 across. Five GPUs close no ring without going
    through GPU 0 twice, which costs a fifth of the two rings: read from that run, no other has it.
    """
    return 25 * GIGA * {2: 1, 3: 2, 4: 4, 5: 1.6, 6: 2, 7: 4}.get(ranks, 6)


def _staged(ranks: int) -> float:
    """Nodes whose GPUs reach the network through host memory, read from the system's own runs.

    One flow makes 7.8 GB/s (send/recv), two GPUs share it, four reach 13 and eight, of two sockets,
    10 (all-reduce of 64 MB). What is left to foretell there is the shape, not the last figure.
    """
    return {1: 7.8, 2: 7.8, 4: 13.0}.get(ranks, 10.0) * GIGA


def _flat(gigabytes: float) -> Callable[[int], float]:
    return lambda _: gigabytes * GIGA


_BRIDGE = Level("nvlink", (2,), 300 * GIGA, 0.0, 1)  # NVLink bridge of A100 and H100 PCIe boards
_SLOW = Net("ethernet", _flat(2.5), 0)  # from the system's own send/recv above 8 MB

# Name pattern → machine; the first that matches. The more special stand first.
_MACHINES: tuple[tuple[str, Machine], ...] = (
    (r"a100.pair", Machine("ampere", "pcie", _flat(24), 4, _BRIDGE, _SLOW)),
    (r"h100.pair", Machine("hopper", "pcie", _flat(48), 4, _BRIDGE, _SLOW)),
    # The pair that was measured is not bridged: 4 GB/s, as through host memory.
    (r"a40.pair", Machine("ampere", "memory", _flat(4.2), 8, None, _SLOW)),
    (r"a100_dgx", Machine("ampere", "nvswitch", _flat(300), 8, None, Net("ethernet", _staged, 0))),
    (r"gb[23]00", Machine("blackwell", "nvswitch", _flat(900), 72)),
    (r"b[23]00", Machine("blackwell", "nvswitch", _flat(900), 8)),
    (r"h[12]00|h20(?!\d)", Machine("hopper", "nvswitch", _flat(450), 8)),
    (r"h800", Machine("hopper", "nvswitch", _flat(200), 8)),
    (r"a800", Machine("ampere", "nvswitch", _flat(200), 8)),
    (r"a100", Machine("ampere", "nvswitch", _flat(300), 8)),
    (r"v100", Machine("volta", "nvlink", _mesh)),
    (r"5090|rtx.?pro.?6000", Machine("blackwell", "pcie", _flat(48))),
    (r"l40|l20|l4(?!\d)|4090|a40|a30|a10(?!\d)|a6000|3090", Machine("ampere", "pcie", _flat(24))),
    (r"2080|t4(?!\d)|p100|1080|titan|p40", Machine("volta", "pcie", _flat(12))),
)


@cache
def machine_of(name: str, links: str = "") -> Machine:
    """The machine a source names; `links` is what it says of its links, in words."""
    found = next((m for pattern, m in _MACHINES if re.search(pattern, name.lower())), None)
    if found is None:
        raise UnmodelledError(
            f"no machine is known as `{name}`",
            hint="describe its links in `validate.collective_systems.py`",
        )
    if found.net is None:
        found = replace(found, net=_network(links.lower(), found.chip))
    inside = links.lower().partition(";")[0]
    if "p2p disabled" in inside or "shm" in inside:
        return replace(found, kind="memory", bandwidth=_flat(4.2))
    if "pcie" in inside and "nvlink" not in inside and "nvswitch" not in inside:
        lane = {"3": 12.0, "5": 48.0}.get((re.findall(r"gen ?(\d)", inside) or ["4"])[0], 24.0)
        return replace(found, kind="pcie", bandwidth=_flat(lane))
    return found


def _network(links: str, chip: str) -> Net:
    """Eight NICs a node at the rate of the chip's time, unless the words say otherwise."""
    if "tcpx" in links:  # GCP a3-mega: 8 × 200 Gb/s
        return Net("ethernet", _flat(200), 8)
    nic = NDR if chip in ("hopper", "blackwell") else HDR
    kind = "ethernet" if "ethernet" in links and "roce" not in links else "infiniband"
    return Net(kind, lambda _: 8 * nic, 8)
