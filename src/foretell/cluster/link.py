"""A link between two vertices of a cluster, and the vocabulary of both.

Every link is full duplex: it carries `bandwidth` each way at once. A bundle of parallel links
(two NVLinks between the same pair) is one `Link` with a `count`.
"""

from dataclasses import dataclass

VERTICES = ("device", "nvswitch", "pcie", "cpu", "nic", "switch")
KINDS = (
    "nvlink",  # device to device, direct
    "nvswitch",  # device to NVSwitch
    "xgmi",  # AMD device to device, direct
    "pcie",
    "upi",  # socket to socket (QPI, UPI, Infinity Fabric)
    "memory",  # CPU rank to its own memory system
    "loopback",  # ranks of one host through its network stack
    "infiniband",
    "ethernet",
)
DIRECT = frozenset({"nvlink", "nvswitch", "xgmi"})  # made for links between devices
NETWORK = frozenset({"infiniband", "ethernet", "loopback"})  # what a NIC may speak


@dataclass(frozen=True)
class Link:
    """One bundle of equal parallel links from `a` to `b`."""

    a: str  # a vertex: `device0` inside a node, `node3/device0` or `leaf2` in a cluster
    b: str
    kind: str
    each: float  # bytes/s each way of one of them
    latency: float  # seconds, one way
    count: int = 1
    index: int = -1  # its row in `cluster.graph`, where it has one
    back: bool = False  # travelled against the order in which `cluster.graph` names its ends

    @property
    def bandwidth(self) -> float:
        """Bytes/s each way of the whole bundle."""
        return self.each * self.count
