"""The machines: devices, links, nodes and clusters as values, and presets of many.

>>> from foretell.cluster import load
>>> cluster = load("dgx-a100:nodes=2")
>>> cluster.size, cluster.bandwidth(0, 1) / 1e9, cluster.bandwidth(0, 8) / 1e9
(16, 300.0, 24.0)
"""

from typing import TYPE_CHECKING

from foretell.lazy import lazy

if TYPE_CHECKING:
    from foretell.cluster.cluster import Calibration as Calibration
    from foretell.cluster.cluster import Cluster as Cluster
    from foretell.cluster.cluster import Switch as Switch
    from foretell.cluster.cluster import Tier as Tier
    from foretell.cluster.cluster import Topology as Topology
    from foretell.cluster.node import Device as Device
    from foretell.cluster.node import Level as Level
    from foretell.cluster.node import Link as Link
    from foretell.cluster.node import Node as Node
    from foretell.cluster.read import Problem as Problem
    from foretell.cluster.read import load as load
    from foretell.cluster.read import names as names
    from foretell.cluster.read import validate as validate

_WHERE = {
    "cluster": "Calibration Cluster Switch Tier Topology",
    "node": "Device Level Link Node",
    "read": "Problem load names validate",
}
__all__ = sorted(" ".join(_WHERE.values()).split())
__getattr__ = lazy(__name__, _WHERE)
