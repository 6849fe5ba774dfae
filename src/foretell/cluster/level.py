"""What a collective sees of a cluster: tiers of members that can send while they receive."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple


class Message(NamedTuple):
    """A collective as it was measured: start + bytes · slope."""

    op: str
    ranks: int
    start: float  # seconds
    slope: float  # seconds a byte


@dataclass(frozen=True)
class Level:
    """One tier of a group of ranks.

    At the innermost tier a member is one device, at the next one whole node, then one leaf or
    rack, and so on. A sub-group of one member has nothing to say to itself: its bandwidth is
    infinite, and a tier made only of such sub-groups is left out.
    """

    kind: str  # of the links that bound it: nvswitch, nvlink, xgmi, pcie, infiniband, ethernet …
    sizes: tuple[int, ...]  # members of each sub-group
    bandwidth: float  # bytes/s one member sends while receiving as much: the slowest member's
    latency: float  # seconds, one message, one way, the slowest pair of neighbours
    channels: int  # parallel paths a member has: NVLinks inside a node, NICs between nodes
    name: str = ""  # what joins the members: node, leaf, rack, spine …
    bandwidths: tuple[float, ...] = ()  # the slowest member of each sub-group, as `sizes`
    later: float = 1.0  # times as long as priced until bytes move (→ foretell.cluster.calibration)
    slower: float = 1.0  # times as long as priced that a byte takes
    tree_bytes: float = inf  # all-reduces above this size go by rings
    timed: tuple[Message, ...] = ()  # what collectives took here: no formula is asked for those
